"""Settings that decide, beside the backend, how an allocator behaves."""

from dataclasses import dataclass

__all__ = ["AllocatorSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Settings of a process's allocator.

    Attributes:
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if the user set it; None models the C library's moving
            threshold.
        torch_version: (major, minor) of torch on the machine, which decides MPS's allocator; None is the installed torch.
    """

    mmap_threshold: int | None = None
    torch_version: tuple[int, int] | None = None
