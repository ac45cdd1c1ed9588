"""The devices that a caller plans for: one by its name, or several with a strategy."""

from lightning_unified.planner.devices.group import DeviceGroup
from lightning_unified.planner.devices.named import backend_of, budget_bytes, calibration_of, speeds_of

__all__ = ["DeviceGroup", "backend_of", "budget_bytes", "calibration_of", "speeds_of"]
