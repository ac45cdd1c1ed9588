"""The memory pool of a run: that of this machine, or of a simulated machine."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from lightning import Trainer

from lightning_unified.hardware.pressure.reader import Pressure, PressureReader
from lightning_unified.hardware.reading import Figure
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.hardware.sources import Sources

__all__ = ["pool_of", "simulated_by", "simulated_pressure"]


def simulated_by(trainer: Trainer) -> SimulatedMachine | None:
    """Return the machine that the trainer's strategy simulates, or None."""
    return getattr(trainer.strategy, "simulated", None)


def pool_of(trainer: Trainer) -> tuple[torch.device, Sources | None]:
    """Return the device of the run's pool, and the readers of a simulated machine.

    The readers are None on a real machine.
    """
    machine = simulated_by(trainer)
    return (trainer.strategy.root_device, None) if machine is None else (torch.device(machine.device), machine.sources)


def simulated_pressure(machine: SimulatedMachine, *, one_pool: bool = False) -> Callable[[], Pressure]:
    """Return a function that samples a simulated machine's pressure.

    Figures and reasons are marked as simulated.
    """
    reader, label = PressureReader(machine.sources, one_pool=one_pool), f"simulated {machine.profile.name}"

    def read() -> Pressure:
        pressure = reader.read(time.monotonic())
        available = Figure(pressure.available.bytes, f"{label}: {pressure.available.source}")
        return replace(pressure, available=available, reasons=tuple(f"{label}: {text}" for text in pressure.reasons))

    return read
