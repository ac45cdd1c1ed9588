"""How torch's allocators round what tensors ask for: Metal's heaps and CUDA's segments, as bytes only.

What is modelled: size classes, reuse of freed blocks, splitting and joining, what can be given back. What is not: streams, the
order in which a driver finishes commands, fragmentation inside a heap, graphs' private pools. Segments that grow are in
`expandable.py`, a process's own heap in `host_heap.py`.
"""

import bisect
from typing import Protocol

from lightning_unified.hardware.allocators.addresses import Addresses
from lightning_unified.units import GIB, MIB

__all__ = ["Block", "CudaSegments", "Freed", "Home", "MetalHeaps", "Pools", "round_up"]

_SMALL = 1 * MIB  # largest small block, of both backends


class Block:
    """Bytes handed out to one tensor, or kept for the next; `home` is the heap or segment it lies in, `at` its address."""

    __slots__ = ("after", "at", "before", "home", "size", "used")

    def __init__(self, size: int, home: "Home", at: int = 0) -> None:
        self.size, self.home, self.at, self.used = size, home, at, True
        self.before: Block | None = None
        self.after: Block | None = None


class Home:
    """One allocation of the driver: a heap of Metal, a segment of CUDA, a mapping of the C library."""

    __slots__ = ("blocks", "room", "size", "small")

    def __init__(self, size: int, *, small: bool) -> None:
        self.size, self.room, self.small, self.blocks = size, size, small, 0


class Pools(Protocol):
    """What an allocator asks of a backend's pools; sizes are bytes, already rounded."""

    @property
    def reserved(self) -> int:
        """What the pools hold of the device, in use or not."""
        ...

    def rounded(self, size: int) -> int:
        """Return what a tensor of `size` takes."""
        ...

    def reuse(self, size: int) -> Block | None:
        """Return a block out of what was freed, None if there is none that fits."""
        ...

    def growth(self, size: int, *, pressed: bool) -> int:
        """Return how many bytes the driver would have to give for a block of `size`."""
        ...

    def place(self, size: int, *, pressed: bool) -> Block:
        """Return a new block, with as much from the driver as `growth` says."""
        ...

    def give_back(self, block: Block) -> None:
        """Keep a freed block for the next tensor."""

    def release(self) -> None:
        """Give the driver back what no tensor is in."""


class Freed:
    """Freed blocks in the order of their size, those of one size in the order of their addresses."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._order: list[tuple[int, int]] = []  # of the blocks: plain tuples, which are compared without a call

    def add(self, block: Block) -> None:
        order = block.size, block.at
        at = bisect.bisect_right(self._order, order)
        self._order.insert(at, order)
        self.blocks.insert(at, block)

    def discard(self, block: Block) -> None:
        at = bisect.bisect_left(self._order, (block.size, block.at))
        while self.blocks[at] is not block:
            at += 1
        del self.blocks[at], self._order[at]

    def smallest(self, size: int) -> Block | None:
        at = bisect.bisect_left(self._order, (size,))
        return self.blocks[at] if at < len(self.blocks) else None

    def larger(self, block: Block) -> Block | None:
        """Return what comes after `block`, which is among the freed."""
        at = bisect.bisect_right(self._order, (block.size, block.at))
        return self.blocks[at] if at < len(self.blocks) else None


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is no less than `size`."""
    return -(-size // multiple) * multiple


class MetalHeaps:
    """MPS: blocks in heaps of 8 MiB (blocks to 1 MiB), 32 MiB (below 10 MiB), 1 GiB (below 512 MiB), else of their own size.

    A freed block is reused whole if it is at most 32 MiB larger than asked; a larger one makes room in its heap. Under pressure
    there are no 1 GiB heaps. The alignment of 256 bytes is judgement: Metal names it per device.

    Source:
        torch's MPSAllocator.h and MPSAllocator.mm: size classes, `get_free_buffer`, `createHeapBlock`.
    """

    _ALIGNMENT = 256
    _LARGE, _HUGE = 10 * MIB, 512 * MIB
    _SMALL_HEAP, _LARGE_HEAP, _HUGE_HEAP, _ROUND = 8 * MIB, 32 * MIB, 1 * GIB, 2 * MIB

    def __init__(self) -> None:
        self.reserved = 0
        self._placed = 0
        self._heaps: list[Home] = []
        self._freed = {True: Freed(), False: Freed()}

    def rounded(self, size: int) -> int:
        return round_up(size, self._ALIGNMENT)

    def reuse(self, size: int) -> Block | None:
        freed = self._freed[size <= _SMALL]
        block = freed.smallest(size)
        if block is None:
            return None
        if block.size > size + self._LARGE_HEAP:
            if self._heap_with_room(size) is None:
                self._release(block, keep_heap=True)
            return None
        freed.discard(block)
        block.used = True
        return block

    def growth(self, size: int, *, pressed: bool) -> int:
        return 0 if self._heap_with_room(size) is not None else self._heap_size(size, pressed=pressed)

    def place(self, size: int, *, pressed: bool) -> Block:
        heap = self._heap_with_room(size)
        if heap is None:
            heap = Home(self._heap_size(size, pressed=pressed), small=size <= _SMALL)
            self._heaps.append(heap)
            self.reserved += heap.size
        heap.room -= size
        heap.blocks += 1
        self._placed += 1
        return Block(size, heap, self._placed)

    def give_back(self, block: Block) -> None:
        block.used = False
        self._freed[block.home.small].add(block)

    def release(self) -> None:
        for freed in self._freed.values():
            for block in list(freed.blocks):
                self._release(block)

    def _release(self, block: Block, *, keep_heap: bool = False) -> None:
        heap = block.home
        self._freed[heap.small].discard(block)
        heap.room += block.size
        heap.blocks -= 1
        if heap.blocks == 0 and not keep_heap:
            self._heaps.remove(heap)
            self.reserved -= heap.size

    def _heap_with_room(self, size: int) -> Home | None:
        small = size <= _SMALL
        fitting = (heap for heap in self._heaps if heap.small is small and heap.room >= size)
        return min(fitting, key=lambda heap: heap.room, default=None)

    def _heap_size(self, size: int, *, pressed: bool) -> int:
        if size <= _SMALL:
            return self._SMALL_HEAP
        if size < self._LARGE:
            return self._LARGE_HEAP
        return self._HUGE_HEAP if size < self._HUGE and not pressed else round_up(size, self._ROUND)


class CudaSegments:
    """CUDA and HIP: blocks of 512 bytes' multiples out of segments of 2 MiB (blocks to 1 MiB), 20 MiB (below 10 MiB), else of 2 MiB's multiples.

    The smallest freed block that fits is taken, of equal ones that of the lowest address, and split where enough remains; freed
    neighbours are joined. Only whole segments go back to the driver. Where a segment lies is up to `addresses`; something was computed at
    the latest when a block is given back.

    Args:
        max_split: `max_split_size_mb` in bytes: blocks of this size and more are neither split nor given to smaller tensors;
            None is torch's default, no such size.
        divisions: `roundup_power2_divisions`: sizes are rounded up to that many steps between two powers of two; 0 for none.

    Attributes:
        addresses: Where segments lie.

    Source:
        torch's CUDACachingAllocator.cpp: `round_size`, `get_allocation_size`, `get_free_block`, `should_split`.
    """

    _ALIGNMENT = 512
    _LARGE = 10 * MIB
    _SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND = 2 * MIB, 20 * MIB, 2 * MIB

    def __init__(self, *, max_split: int | None = None, divisions: int = 0) -> None:
        self.reserved = 0
        self._max_split, self._divisions = max_split, divisions
        self.addresses = Addresses()
        self._freed = {True: Freed(), False: Freed()}

    def rounded(self, size: int) -> int:
        if self._divisions > 1 and size > self._ALIGNMENT * self._divisions:
            power = 1 << (size.bit_length() - 1)
            step = power >> (self._divisions.bit_length() - 1)
            return size if size == power else round_up(size, step)
        return round_up(size, self._ALIGNMENT)

    def reuse(self, size: int) -> Block | None:
        freed = self._freed[size <= _SMALL]
        block = self._best(freed, size)
        if block is None or self._oversize(block, size):
            return None
        freed.discard(block)
        return self._cut(block, size)

    def _best(self, freed: Freed, size: int) -> Block | None:
        return freed.smallest(size)

    def _oversize(self, block: Block, size: int) -> bool:
        """Say whether `block` is kept for tensors that are too large to be split for."""
        if self._max_split is None:
            return False
        if size < self._max_split:
            return block.size >= self._max_split
        return block.size >= size + self._LARGE_SEGMENT

    def growth(self, size: int, *, pressed: bool) -> int:
        del pressed  # segments are as large whether memory is short or not
        if size <= _SMALL:
            return self._SMALL_SEGMENT
        return self._LARGE_SEGMENT if size < self._LARGE else round_up(size, self._ROUND)

    def place(self, size: int, *, pressed: bool) -> Block:
        segment = Home(self.growth(size, pressed=pressed), small=size <= _SMALL)
        self.reserved += segment.size
        return self._cut(Block(segment.size, segment, self.addresses.place(segment.size)), size)

    def give_back(self, block: Block) -> None:
        self.addresses.compute()
        block.used = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.used:
                self._freed[block.home.small].discard(neighbour)
                self._join(block, neighbour)
        self._freed[block.home.small].add(block)

    def release(self) -> None:
        for freed in self._freed.values():
            whole = [block for block in freed.blocks if block.before is None and block.after is None]
            for block in whole:
                freed.discard(block)
                self.reserved -= block.size

    def _cut(self, block: Block, size: int) -> Block:
        block.used = True
        rest = block.size - size
        if self._splits(rest, size, small=block.home.small):
            remainder = Block(rest, block.home, block.at + size)
            remainder.before, remainder.after, remainder.used = block, block.after, False
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            self._freed[block.home.small].add(remainder)
        return block

    def _splits(self, rest: int, size: int, *, small: bool) -> bool:
        if small:
            return rest >= self._ALIGNMENT
        return rest > _SMALL and (self._max_split is None or size < self._max_split)

    def _join(self, block: Block, neighbour: Block) -> None:
        block.size += neighbour.size
        if block.before is neighbour:
            block.at = neighbour.at
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
