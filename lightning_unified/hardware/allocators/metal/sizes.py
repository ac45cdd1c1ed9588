"""Sizes of Metal's blocks and heaps, the same in both of torch's allocators.

| block | heap |
|---|---|
| up to 1 MiB | 8 MiB |
| below 10 MiB | 32 MiB |
| below 512 MiB | 1 GiB; under pressure the block's own size |
| larger | the block's own size, rounded up to 2 MiB |

Source:
    torch's MPSAllocator.h: `kMaxSmallAlloc`, `kMinLargeAlloc`, `kSmallHeap`, `kLargeHeap`, `kXLargeHeap`, `kRoundLarge`,
    `createHeapBlock`, and `getHeapTier` from 2.14 on. Read in the macOS wheels of torch 2.13.0 and 2.14.1. `ALIGNMENT` is
    judgement: Metal reports it for each device (`heapBufferSizeAndAlignWithLength`).
"""

from lightning_unified.hardware.allocators.pools import round_up
from lightning_unified.units import GIB, MIB

__all__ = ["ALIGNMENT", "SMALL", "aligned", "heap_class", "heap_size", "is_small"]

ALIGNMENT = 256
"""Multiple of bytes to which Metal rounds a block."""

SMALL = 1 * MIB
"""Most bytes of a block of the pool of small blocks."""

_LARGE, _HUGE = 10 * MIB, 512 * MIB
_SMALL_HEAP, _LARGE_HEAP, _HUGE_HEAP, _ROUND = 8 * MIB, 32 * MIB, 1 * GIB, 2 * MIB


def aligned(size: int) -> int:
    """Return the bytes of a buffer of `size` as Metal rounds them."""
    return round_up(size, ALIGNMENT)


def is_small(size: int) -> bool:
    """Return whether a rounded size belongs to the pool of small blocks."""
    return size <= SMALL


def heap_size(size: int, *, pressed: bool) -> int:
    """Return the bytes of the heap that is opened for a block of `size`."""
    shared = heap_class(size, pressed=pressed)
    return round_up(size, _ROUND) if shared is None else shared


def heap_class(size: int, *, pressed: bool) -> int | None:
    """Return the bytes of the heaps in which blocks of `size` lie together.

    The result is None for a block with a heap of its own.
    """
    if size <= SMALL:
        return _SMALL_HEAP
    if size < _LARGE:
        return _LARGE_HEAP
    return _HUGE_HEAP if size < _HUGE and not pressed else None
