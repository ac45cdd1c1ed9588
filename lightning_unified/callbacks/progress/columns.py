"""The columns that the bars add: memory, micro-batch size, memory pressure."""

from typing import Any

from lightning import Trainer

from lightning_unified.callbacks.device_pool import simulated_by
from lightning_unified.callbacks.pressure.guard import PressureGuard
from lightning_unified.hardware.reading import Reading
from lightning_unified.units import GIB

__all__ = ["memory_columns"]


def memory_columns(trainer: Trainer, reading: Reading) -> dict[str, str]:
    """Return the columns by name; an unknown figure has none."""
    columns = {}
    budget = getattr(getattr(trainer.strategy, "budget", None), "bytes", None)
    limit = reading.total.bytes if budget is None else budget
    if reading.allocated.bytes is not None:
        used = f"{reading.allocated.bytes / GIB:.1f}"
        columns["mem"] = f"{used} GiB" if limit is None else f"{used}/{limit / GIB:.1f} GiB"
        machine = simulated_by(trainer)
        if machine is not None:
            columns["mem"] += f" (simulated {machine.profile.name})"
    micro_batch_size = getattr(trainer.strategy, "micro_batch_size", None)
    if micro_batch_size is not None:
        columns["micro"] = str(micro_batch_size)
    level = _pressure_level(trainer)
    if level is not None:
        columns["pressure"] = level
    return columns


def _pressure_level(trainer: Trainer) -> str | None:
    """Return the newest level that a `PressureGuard` has read, None without one."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    levels = (callback.pressure_level for callback in callbacks if isinstance(callback, PressureGuard))
    return next((level for level in levels if level != "unknown"), None)
