"""Readers of memory pools, one for each backend, and `read`, which chooses by device."""

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.host.memory import read_cpu
from lightning_unified.hardware.readers.cuda import read_cuda
from lightning_unified.hardware.readers.mps import read_mps
from lightning_unified.hardware.readers.xpu import read_xpu
from lightning_unified.hardware.reading import Figure, Reading
from lightning_unified.hardware.sources import Sources

if TYPE_CHECKING:
    import torch

__all__ = ["backends_here", "read"]


def read(device: "str | torch.device" = "auto", *, sources: Sources | None = None) -> Reading:
    """Read the memory pool of `device` without waiting for the device.

    On MPS the first reading constructs Metal's allocator, which freezes both watermark ratios for the life of the process. So
    a run with a budget calls `set_mps_environment(spec)` before any reading; a reading that comes first writes the safe pair
    itself.

    Args:
        device: A torch device or its text; `"auto"` is the accelerator of this machine, else the CPU. An Intel GPU is read
            only by name, because Lightning 2.6 cannot train on it.
        sources: Sources of the figures; default this machine.

    Raises:
        HardwareError: If the device is not present.
    """
    sources = sources or Sources.live()
    here = backends_here(sources)
    trains = next(kind for kind in here if kind != "xpu")
    kind, _, index = (trains if str(device) == "auto" else str(device)).partition(":")
    readers = {"cpu": read_cpu, "cuda": read_cuda, "mps": read_mps, "xpu": read_xpu}
    if kind not in readers or (index and not index.isdigit()):
        raise HardwareError(f"device {str(device)!r} has no reader; use auto, cpu, cuda, cuda:<index>, mps or xpu.")
    if kind not in here:
        raise HardwareError(
            f"device {str(device)!r} is not present; this machine has {', '.join(here)}: use one of these or auto."
        )
    reading = readers[kind](sources, int(index) if index else None)
    return reading if sources.simulated is None else _labelled(reading, f"simulated {sources.simulated}")


def _labelled(reading: Reading, label: str) -> Reading:
    """Mark a reading as simulated, in its name and in the source of each figure."""
    figures = {name: getattr(reading, name) for name in ("total", "available", "allocated", "reserved", "peak", "host")}
    labelled = {name: Figure(figure.bytes, f"{label}: {figure.source}") for name, figure in figures.items()}
    return replace(reading, name=f"{reading.name} ({label})", **labelled)


def backends_here(sources: Sources) -> list[str]:
    """Return the torch device types that work on this machine; the CPU is last."""
    torch = sources.torch
    found = []
    for kind, module in (
        ("cuda", getattr(torch, "cuda", None)),
        ("mps", getattr(getattr(torch, "backends", None), "mps", None)),
        ("xpu", getattr(torch, "xpu", None)),
    ):
        if module is not None and module.is_available():
            found.append(kind)
    return [*found, "cpu"]
