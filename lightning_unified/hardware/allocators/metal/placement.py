"""Model MPS's allocator since torch 2.14, which places buffers, and splits and joins ranges."""

import math
from typing import cast

from lightning_unified.hardware.allocators.metal.limits import MetalLimits
from lightning_unified.hardware.allocators.metal.sizes import ALIGNMENT, aligned, heap_class, heap_size, is_small
from lightning_unified.hardware.allocators.pools import Block, Freed, Home, round_up
from lightning_unified.units import KIB, MIB

__all__ = ["PlacementHeaps"]

_PAGE = 16 * KIB  # `vm_page_size` of Apple silicon
_BUCKETS = 32  # sizes of large blocks between two powers of two
_APART = 1 << 48  # distance between the addresses of two heaps; more than any heap's size


class PlacementHeaps:
    """MPS's allocator since torch 2.14: blocks partition heaps, whose sizes are in `sizes.py`.

    - A block above 1 MiB is rounded up to one of 32 sizes between two powers of two, at least to pages of 16 KiB, unless
      that reaches the next class of heaps or Metal's longest buffer.
    - A freed block keeps its buffer. It is reused unchanged if it exceeds the request by less than the least remainder: 256
      bytes of a small block, 1 MiB of a large one. The block then counts whole.
    - Otherwise the smallest free range that fits is split at the request. A remainder below the least remainder stays in the
      block.
    - Otherwise neighbours are joined, in the oldest heap that has enough of them side by side. Freed blocks are joined only
      when they are needed.
    - Otherwise a heap is opened. Only heaps without a live block return to the driver, the oldest first.

    No setting restores the former allocator.

    The model leaves out other streams than the default one, pinned host memory, the pool of scalars, and buffers that the GPU
    still uses: such buffers can be reused unchanged, but neither split nor joined. The GPU can therefore reserve more while
    memory is plentiful; before it fails, the allocator waits for the GPU. Among free ranges of one size torch takes the one
    whose heap has the lower address in host memory. The model takes the older heap, which was not confirmed. Not run on
    hardware.

    Args:
        max_buffer: Metal's longest buffer in bytes; None if unknown.

    Source:
        torch's MPSAllocator.mm (pull request 190438): `get_allocation_size`, `get_free_buffer`, `split_free_block`,
        `coalesce_free_blocks`, `alloc_heap`, `release_free_heaps`, `garbage_collect_cached_buffers`, `alloc_buffer_block`. The
        source was read at a commit between 2.14 and 2.15. The functions were compared with the machine code in the macOS
        wheel of torch 2.14.1 (git revision 5c488690), `alloc_heap` and `garbage_collect_cached_buffers` only up to their decisions.
        The constants are in that wheel's MPSAllocator.h.
    """

    def __init__(self, *, max_buffer: int | None = None) -> None:
        self.reserved = 0
        self._longest = math.inf if max_buffer is None else max_buffer
        self._pools = {True: _Pool(least=ALIGNMENT), False: _Pool(least=MIB)}
        self._opened = 0

    def rounded(self, size: int) -> int:
        exact = aligned(size)
        if is_small(exact):
            return exact
        magnitude = 1 << (exact.bit_length() - 1)
        bucket = round_up(exact, max(magnitude // _BUCKETS, _PAGE))
        same_heaps = heap_class(bucket, pressed=False) == heap_class(exact, pressed=False)
        return bucket if bucket < self._longest and same_heaps else exact

    def take(self, size: int, limits: MetalLimits) -> Block | None:
        """Return a block within the watermarks, reused or new; None if memory is out."""
        pool = self._pools[is_small(size)]
        pressed = not is_small(size) and limits.are_near(self.reserved)
        block = self._reused(size, limits)
        if block is not None:
            return block
        if pressed and size < pool.free_bytes:
            self._close(pool, limits.excess(self.reserved))
        block = self._opened_within(size, limits, pressed=pressed)
        if block is None and self._close(pool, size):
            block = self._opened_within(size, limits, pressed=pressed)
        if block is None:
            self.release()
            block = self._reused(size, limits) or self._opened_within(size, limits, pressed=pressed)
        return block

    def reuse(self, size: int) -> Block | None:
        return self._pools[is_small(size)].reuse(size)

    def growth(self, size: int, *, pressed: bool) -> int:
        return heap_size(size, pressed=pressed)

    def place(self, size: int, *, pressed: bool) -> Block:
        heap = _Heap(heap_size(size, pressed=pressed), small=is_small(size))
        self._opened += 1
        self.reserved += heap.size
        return self._pools[heap.small].open(heap, size, at=self._opened * _APART)

    def give_back(self, block: Block) -> None:
        self._pools[block.home.small].give_back(cast("_Range", block))

    def release(self) -> None:
        for pool in self._pools.values():
            self._close(pool, math.inf)

    def _reused(self, size: int, limits: MetalLimits) -> Block | None:
        return self.reuse(size) if limits.allow(size, reserved=self.reserved) else None

    def _opened_within(self, size: int, limits: MetalLimits, *, pressed: bool) -> Block | None:
        return self.place(size, pressed=pressed) if limits.allow(size, reserved=self.reserved) else None

    def _close(self, pool: "_Pool", wanted: float) -> int:
        """Return unused heaps of `wanted` bytes to the driver; return their bytes."""
        closed = pool.close(wanted)
        self.reserved -= closed
        return closed


class _Heap(Home):
    """A heap: `room` is the sum of its free ranges, `longest` an upper bound of its longest one.

    `longest` counts free neighbours as one range.
    """

    __slots__ = ("longest", "ranges")

    def __init__(self, size: int, *, small: bool) -> None:
        super().__init__(size, small=small)
        self.longest = size
        self.ranges: list[_Range] = []  # in order of their addresses


class _Range(Block):
    """A live or free range of a heap; `cached` says whether a buffer covers exactly this range."""

    __slots__ = ("cached", "heap")

    def __init__(self, size: int, heap: _Heap, at: int) -> None:
        super().__init__(size, heap, at)
        self.heap, self.cached = heap, False


class _Pool:
    """Heaps and free ranges of small or of large blocks.

    Attributes:
        free_bytes: Sum of the free ranges.
    """

    def __init__(self, *, least: int) -> None:
        self.free_bytes = 0
        self._least = least
        self._heaps: list[_Heap] = []  # the oldest first
        self._free, self._cached = Freed(), Freed()

    def reuse(self, size: int) -> _Range | None:
        """Return a range of `size` from the free ones: whole, split from a larger one, or joined."""
        found = self._cached.smallest(size)
        if found is None or found.size - size >= self._least:
            found = self._free.smallest(size)
        range_ = self._join(size) if found is None else cast("_Range", found)
        return None if range_ is None else self._split_off(range_, size)

    def open(self, heap: _Heap, size: int, *, at: int) -> _Range:
        """Return a range of `size` from a new heap at the address `at`."""
        self._heaps.append(heap)
        whole = _Range(heap.size, heap, at)
        heap.ranges.append(whole)
        heap.room = 0
        self._add(whole)
        return self._split_off(whole, size)

    def give_back(self, range_: _Range) -> None:
        """Make a live range free; its buffer stays on it."""
        self._add(range_)
        range_.heap.longest = range_.heap.room  # its neighbours may be free as well

    def close(self, wanted: float) -> int:
        """Close heaps without a live range until they amount to `wanted` bytes; return their bytes.

        The oldest heap is the first.
        """
        closed = 0
        for heap in [heap for heap in self._heaps if heap.room == heap.size]:
            if closed >= wanted:
                break
            for range_ in heap.ranges:
                self._discard(range_)
            self._heaps.remove(heap)
            closed += heap.size
        return closed

    def _split_off(self, range_: _Range, size: int) -> _Range:
        """Take a free range for a block of `size`.

        The remainder stays free, unless it is too small.
        """
        heap = range_.heap
        self._discard(range_)
        if range_.size - size >= self._least:
            rest = _Range(range_.size - size, heap, range_.at + size)
            heap.ranges.insert(heap.ranges.index(range_) + 1, rest)
            range_.size = size
            self._add(rest)
        range_.used = range_.cached = True
        heap.longest = min(heap.longest, heap.room)
        return range_

    def _join(self, size: int) -> _Range | None:
        """Return a free range of at least `size`, joined from the first neighbours that suffice."""
        for heap in self._heaps:
            if heap.longest < size:
                continue
            longest = length = first = 0
            for index, range_ in enumerate(heap.ranges):
                if range_.used:
                    length, first = 0, index + 1
                    continue
                length += range_.size
                longest = max(longest, length)
                if length >= size:
                    return self._merge(heap, first, index + 1)
            heap.longest = longest
        return None

    def _merge(self, heap: _Heap, first: int, end: int) -> _Range:
        """Replace the free ranges from `first` to before `end` by one."""
        merged = heap.ranges[first]
        for range_ in heap.ranges[first:end]:
            self._discard(range_)
        merged.size = sum(range_.size for range_ in heap.ranges[first:end])
        del heap.ranges[first + 1 : end]
        self._add(merged)
        return merged

    def _add(self, range_: _Range) -> None:
        range_.used = False
        self._free.add(range_)
        if range_.cached:
            self._cached.add(range_)
        range_.heap.room += range_.size
        self.free_bytes += range_.size

    def _discard(self, range_: _Range) -> None:
        self._free.discard(range_)
        if range_.cached:
            self._cached.discard(range_)
        range_.heap.room -= range_.size
        self.free_bytes -= range_.size
