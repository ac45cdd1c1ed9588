"""Read the peak at little enough cost for every step; reset it where the counter allows it."""

from typing import TYPE_CHECKING

from lightning_unified.hardware.host.memory import peak_resident
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.reading import Figure
from lightning_unified.hardware.sources import Sources

if TYPE_CHECKING:
    import torch

__all__ = ["read_peak", "reset_peak"]


def read_peak(device: "str | torch.device", *, sources: Sources | None = None) -> Figure:
    """Return the peak bytes of `device`'s pool in this process since the counter began."""
    sources = sources or Sources.live()
    return peak_resident(sources) if str(device).startswith("cpu") else read(device, sources=sources).peak


def reset_peak(device: "str | torch.device", *, sources: Sources | None = None) -> bool:
    """Reset the peak of `device` to its present use.

    Return False if the counter cannot be reset.

    Source:
        Linux `man 5 proc`, clear_refs: writing 5 resets VmHWM to VmRSS. torch.accelerator has an allocator for MPS since
            2.13.
    """
    sources = sources or Sources.live()
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        try:
            (sources.proc / "self" / "clear_refs").write_text("5")
        except OSError:
            return False
        return True
    if kind == "mps":
        try:
            sources.torch.accelerator.reset_peak_memory_stats()
        except RuntimeError:
            return False
        return True
    getattr(sources.torch, kind).reset_peak_memory_stats(device)
    return True
