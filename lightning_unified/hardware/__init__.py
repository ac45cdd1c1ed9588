"""Layer 1: memory and capabilities of the machine.

Nothing here imports torch before a reading.
"""

from lightning_unified.hardware.budget import (
    Budget,
    BudgetFollower,
    divide_budget,
    fixed_tiers,
    parse_spec,
    resolve_budget,
)
from lightning_unified.hardware.capabilities import Capability, capabilities, capability
from lightning_unified.hardware.environment.mps import mps_allocator_initialized
from lightning_unified.hardware.environment.variables import Finding, lint_environment
from lightning_unified.hardware.environment.watermarks import (
    Cap,
    Watermarks,
    cap_allocator,
    prepare_allocators,
    set_mps_environment,
    watermarks,
)
from lightning_unified.hardware.pressure.caches import CachePolicy, ShapeWatch, idle_bytes
from lightning_unified.hardware.pressure.reader import Pressure, PressureReader
from lightning_unified.hardware.pressure.thrash import Thrash, ThrashDetector
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.readers.gpus import DeviceUse, GpuReader
from lightning_unified.hardware.readers.peak import read_peak, reset_peak
from lightning_unified.hardware.reading import Figure, Reading
from lightning_unified.hardware.run_settings import HARDWARE, HardwareSettings, describe, detect, host_threads, require
from lightning_unified.hardware.sources import Sources

__all__ = [
    "HARDWARE",
    "Budget",
    "BudgetFollower",
    "CachePolicy",
    "Cap",
    "Capability",
    "DeviceUse",
    "Figure",
    "Finding",
    "GpuReader",
    "HardwareSettings",
    "Pressure",
    "PressureReader",
    "Reading",
    "ShapeWatch",
    "Sources",
    "Thrash",
    "ThrashDetector",
    "Watermarks",
    "cap_allocator",
    "capabilities",
    "capability",
    "describe",
    "detect",
    "divide_budget",
    "fixed_tiers",
    "host_threads",
    "idle_bytes",
    "lint_environment",
    "mps_allocator_initialized",
    "parse_spec",
    "prepare_allocators",
    "read",
    "read_peak",
    "require",
    "reset_peak",
    "resolve_budget",
    "set_mps_environment",
    "watermarks",
]
