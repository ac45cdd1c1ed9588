"""Settings that decide, beside the backend, how an allocator behaves."""

from dataclasses import dataclass

from lightning_unified.hardware.host.memory import mmap_threshold
from lightning_unified.hardware.sources import Sources, torch_version

__all__ = ["AllocatorSettings", "allocator_settings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Settings of a process's allocator.

    Attributes:
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if the user set it; None models the C library's moving
            threshold.
        expandable: Whether CUDA's segments expand (`expandable_segments`).
        torch_version: (major, minor) of torch on the machine, which decides MPS's allocator; None is the installed torch.
    """

    mmap_threshold: int | None = None
    expandable: bool = False
    torch_version: tuple[int, int] | None = None


def allocator_settings(sources: Sources, *, on_host: bool, expandable: bool = False) -> AllocatorSettings:
    """Return the settings of a machine's allocator.

    Args:
        sources: Sources of the machine.
        on_host: Whether tensors are in host memory, whose allocator the user can set.
        expandable: Whether segments expand.
    """
    threshold = mmap_threshold(sources) if on_host else None
    return AllocatorSettings(mmap_threshold=threshold, expandable=expandable, torch_version=torch_version(sources))
