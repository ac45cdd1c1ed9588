"""Model MPS's allocator of torch 2.11 to 2.13, in which Metal places the blocks.

A freed block is reused whole.
"""

import bisect
from typing import cast

from lightning_unified.hardware.allocators.metal.limits import MetalLimits
from lightning_unified.hardware.allocators.metal.sizes import SMALL, aligned, heap_size, is_small
from lightning_unified.hardware.allocators.pools import Block, Freed, Home
from lightning_unified.units import MIB

__all__ = ["MetalHeaps"]


class MetalHeaps:
    """MPS's allocator until torch 2.13: blocks in the heaps of `sizes.py`, placed by Metal.

    A freed block is reused whole if it exceeds the request by at most 32 MiB; a larger one is returned to its heap. Short of
    memory, the model returns all unused blocks; torch returns the ones that were unused for longest.

    Source:
        torch's MPSAllocator.h and MPSAllocator.mm: size classes, `get_free_buffer`, `createHeapBlock`, `alloc_buffer_block`.
    """

    _OVERSIZE = 32 * MIB

    def __init__(self) -> None:
        self.reserved = 0
        self._placed = self._opened = 0
        self._rooms: dict[bool, _Rooms] = {True: _Rooms(), False: _Rooms()}
        self._freed = {True: Freed(), False: Freed()}

    def rounded(self, size: int) -> int:
        return aligned(size)

    def take(self, size: int, limits: MetalLimits) -> Block | None:
        """Return a block within the watermarks, reused or new; None if memory is out."""
        if self.reserved + size < limits.lowest or limits.allow(size, self.reserved):
            block = self._freed[size <= SMALL].pop(size, size + self._OVERSIZE)
            if block is not None:
                return block
            self._return_larger(size)
        pressed = not is_small(size) and limits.are_near(self.reserved)
        if not pressed and limits.allow(size, reserved=self.reserved):
            return self.place(size, pressed=False)
        self.release()
        return self.place(size, pressed=pressed) if limits.allow(size, reserved=self.reserved) else None

    def reuse(self, size: int) -> Block | None:
        block = self._freed[is_small(size)].pop(size, size + self._OVERSIZE)
        if block is None:
            self._return_larger(size)
            return None
        return block

    def _return_larger(self, size: int) -> None:
        """Return a freed block that is too large for `size` to its heap, if no heap has room."""
        block = self._freed[is_small(size)].smallest(size)
        if block is not None and self._heap_with_room(size) is None:
            self._release(block, keep_heap=True)

    def growth(self, size: int, *, pressed: bool) -> int:
        return 0 if self._heap_with_room(size) is not None else heap_size(size, pressed=pressed)

    def place(self, size: int, *, pressed: bool) -> Block:
        heap = self._heap_with_room(size)
        if heap is None:
            self._opened += 1
            heap = _Heap(heap_size(size, pressed=pressed), small=is_small(size), number=self._opened)
            self._rooms[heap.small].add(heap)
            self.reserved += heap.size
        self._rooms[heap.small].change(heap, -size)
        heap.blocks += 1
        self._placed += 1
        return Block(size, heap, self._placed)

    def give_back(self, block: Block) -> None:
        self._freed[block.home.small].add(block)

    def release(self) -> None:
        for freed in self._freed.values():
            for block in list(freed.blocks):
                self._release(block)

    def _release(self, block: Block, *, keep_heap: bool = False) -> None:
        heap = cast("_Heap", block.home)
        self._freed[heap.small].discard(block)
        self._rooms[heap.small].change(heap, block.size)
        heap.blocks -= 1
        if heap.blocks == 0 and not keep_heap:
            self._rooms[heap.small].remove(heap)
            self.reserved -= heap.size

    def _heap_with_room(self, size: int) -> "_Heap | None":
        return self._rooms[is_small(size)].least(size)


class _Heap(Home):
    """A heap; `number` counts the heaps in the order in which they were opened."""

    __slots__ = ("number",)

    def __init__(self, size: int, *, small: bool, number: int) -> None:
        super().__init__(size, small=small)
        self.number = number


class _Rooms:
    """Heaps sorted by free bytes, then by age.

    Replays search for free bytes far more often than they open heaps.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._heaps: dict[int, _Heap] = {}

    def add(self, heap: _Heap) -> None:
        self._heaps[heap.number] = heap
        bisect.insort(self._order, (heap.room, heap.number))

    def remove(self, heap: _Heap) -> None:
        del self._heaps[heap.number]
        del self._order[bisect.bisect_left(self._order, (heap.room, heap.number))]

    def change(self, heap: _Heap, by: int) -> None:
        """Add `by` bytes to the room of a heap."""
        del self._order[bisect.bisect_left(self._order, (heap.room, heap.number))]
        heap.room += by
        bisect.insort(self._order, (heap.room, heap.number))

    def least(self, size: int) -> _Heap | None:
        """Return the heap with the fewest free bytes that `size` fits into; None if there is none.

        Of several such heaps, the oldest is returned.
        """
        at = bisect.bisect_left(self._order, (size,))
        return self._heaps[self._order[at][1]] if at < len(self._order) else None
