"""Models of torch's allocators as bytes only: their interface, and CUDA's segments.

torch never asks the driver for each tensor. It rounds the size, looks for a freed block, and otherwise places a new block in
a heap or segment from the driver. Every allocator here follows the `Pools` protocol:

1. `rounded(size)`: round the request.
2. `reuse(size)`: return a freed block, split if it is much larger.
3. `place(size)`: otherwise take `growth(size)` more bytes from the driver.
4. `give_back(block)`: keep a freed block, merged with free neighbours.
5. `release()`: return unused memory to the driver.

Modelled are size classes, reuse, splitting, merging, release and CUDA's streams. Not modelled are the order in which a driver
finishes commands, private pools of graphs, and the settings `max_split_size_mb` and `roundup_power2_divisions`. `expandable.py` models
`expandable_segments`, `metal/` Metal's heaps, `host_heap.py` a process's own heap.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

from lightning_unified.hardware.allocators.addresses import Addresses
from lightning_unified.units import MIB

__all__ = ["Block", "CudaSegments", "Freed", "Home", "Pools", "round_up"]

_SMALL = 1 * MIB  # largest small block


class Block:
    """Bytes of one tensor, or kept for the next.

    `home` is its heap or segment, `at` its address. Addresses without memory behind them are not `mapped`.
    """

    __slots__ = ("after", "at", "before", "home", "mapped", "size", "used")

    def __init__(self, size: int, home: "Home", at: int = 0) -> None:
        self.size, self.home, self.at, self.used, self.mapped = size, home, at, True, True
        self.before: Block | None = None
        self.after: Block | None = None

    def insert_before(self, other: "Block") -> None:
        """Link this block in front of `other`."""
        self.before, self.after = other.before, other
        if self.before is not None:
            self.before.after = self
        other.before = self

    def split_off(self, size: int) -> "Block":
        """Shorten this block to `size` and return the rest of it, in use."""
        rest = Block(self.size - size, self.home, self.at + size)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, neighbour: "Block") -> None:
        """Take the bytes of the block before or after this one."""
        self.size += neighbour.size
        if self.before is neighbour:
            self.at, self.before = neighbour.at, neighbour.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self


class Home:
    """One allocation of the driver: a Metal heap, a CUDA segment or a mapping of the C library."""

    __slots__ = ("blocks", "room", "size", "small", "stream")

    def __init__(self, size: int, *, small: bool, stream: int = 0) -> None:
        self.size, self.room, self.small, self.stream, self.blocks = size, size, small, stream, 0


class Pools(Protocol):
    """Interface of a backend's allocator model; sizes are bytes, already rounded."""

    @property
    def reserved(self) -> int:
        """Bytes of the device that the pools hold, in use or not."""
        ...

    def rounded(self, size: int) -> int:
        """Return the bytes a tensor of `size` takes."""
        ...

    def reuse(self, size: int) -> Block | None:
        """Return a freed block that fits, None if there is none."""
        ...

    def growth(self, size: int, *, pressed: bool) -> int:
        """Return the bytes the driver must give for a block of `size`."""
        ...

    def place(self, size: int, *, pressed: bool) -> Block:
        """Return a new block; the driver gives the bytes of `growth`."""
        ...

    def give_back(self, block: Block) -> None:
        """Keep a freed block for later tensors."""

    def release(self) -> None:
        """Return memory without tensors to the driver."""


class Freed:
    """Freed blocks ordered by size, then by address.

    Blocks of one size lie together. Most tensors have the size of a freed block, so they need no search among all blocks.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._by_size: dict[int, tuple[list[int], list[Block]]] = {}  # addresses, and the blocks in the same order

    @property
    def blocks(self) -> list[Block]:
        """All blocks in their order."""
        return [block for size in self._sizes for block in self._by_size[size][1]]

    def add(self, block: Block) -> None:
        size, place = block.size, block.at
        equal = self._by_size.get(size)
        if equal is None:
            bisect.insort(self._sizes, size)
            self._by_size[size] = [place], [block]
            return
        places, blocks = equal
        at = bisect.bisect_right(places, place)
        places.insert(at, place)
        blocks.insert(at, block)

    def discard(self, block: Block) -> None:
        places, blocks = self._by_size[block.size]
        at = bisect.bisect_left(places, block.at)
        while blocks[at] is not block:
            at += 1
        self._remove(block.size, at)

    def smallest(self, size: int) -> Block | None:
        """Return the smallest block of at least `size` bytes."""
        found = self._size_from(size)
        return None if found is None else self._by_size[found][1][0]

    def from_size(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least `size` bytes in their order."""
        for found in self._sizes[bisect.bisect_left(self._sizes, size) :]:
            yield from self._by_size[found][1]

    def pop(self, size: int, most: float) -> Block | None:
        """Remove and return the smallest block from `size` to `most` bytes; None if there is none."""
        equal = self._by_size.get(size)
        if equal is not None and len(equal[1]) > 1:  # of most tensors; a replay asks a million times
            del equal[0][0]
            return equal[1].pop(0)
        found = self._size_from(size) if equal is None else size
        return None if found is None or found > most else self._remove(found, 0)

    def _size_from(self, size: int) -> int | None:
        """Return the smallest size of a block that is at least `size`; None if there is none."""
        at = bisect.bisect_left(self._sizes, size)
        return self._sizes[at] if at < len(self._sizes) else None

    def _remove(self, size: int, at: int) -> Block:
        places, blocks = self._by_size[size]
        if len(blocks) == 1:
            del self._by_size[size], self._sizes[bisect.bisect_left(self._sizes, size)]
        del places[at]
        return blocks.pop(at)


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


class CudaSegments:
    """CUDA's and HIP's allocator: blocks of multiples of 512 bytes in segments.

    | block | segment |
    |---|---|
    | up to 1 MiB | 2 MiB |
    | below 10 MiB | 20 MiB |
    | larger | the block's own size, rounded up to 2 MiB |

    The smallest freed block of the same stream that fits is taken, at equal sizes the one of the lowest address. It is split if
    enough remains, and freed neighbours merge. Only whole segments go back to the driver. `addresses` places segments; at the
    latest when a block is freed, a kernel has run.

    Attributes:
        addresses: Addresses of segments.

    Source:
        torch's CUDACachingAllocator.cpp: `round_size`, `get_allocation_size`, `get_free_block`, `should_split`.
    """

    _ALIGNMENT = 512
    _LARGE = 10 * MIB
    _SMALL_SEGMENT, _LARGE_SEGMENT, _ROUND = 2 * MIB, 20 * MIB, 2 * MIB

    def __init__(self) -> None:
        self.reserved = 0
        self.addresses = Addresses()
        self._stream = 0
        # by the stream, and whether blocks are small
        self._freed: defaultdict[tuple[int, bool], Freed] = defaultdict(Freed)

    def on_stream(self, stream: int) -> None:
        """Let `reuse` and `place` return blocks of a stream from now on; 0 is the default stream."""
        self._stream = stream

    def rounded(self, size: int) -> int:
        return round_up(size, self._ALIGNMENT)

    def reuse(self, size: int) -> Block | None:
        block = self._freed[self._stream, self._is_small(size)].pop(size, most=math.inf)
        return None if block is None else self._split(block, size)

    def growth(self, size: int, *, pressed: bool) -> int:
        del pressed  # segments have the same size whether memory is short or not
        if self._is_small(size):
            return self._SMALL_SEGMENT
        return self._LARGE_SEGMENT if size < self._LARGE else round_up(size, self._ROUND)

    def place(self, size: int, *, pressed: bool) -> Block:
        segment = Home(self.growth(size, pressed=pressed), small=self._is_small(size), stream=self._stream)
        self.reserved += segment.size
        return self._split(Block(segment.size, segment, self.addresses.place(segment.size)), size)

    def give_back(self, block: Block) -> None:
        self.addresses.compute()
        self._free(block)

    def release(self) -> None:
        for freed in self._freed.values():
            whole = [block for block in freed.blocks if block.before is None and block.after is None]
            for block in whole:
                freed.discard(block)
                self.reserved -= block.size

    def _split(self, block: Block, size: int) -> Block:
        block.used = True
        rest = block.size - size
        if rest >= self._ALIGNMENT if block.home.small else rest > _SMALL:
            remainder = block.split_off(size)
            remainder.used = False
            self._freed_beside(block).add(remainder)
        return block

    def _free(self, block: Block) -> None:
        """Keep a block without use, merged with its free neighbours."""
        block.used = False
        freed = self._freed_beside(block)
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.mapped and not neighbour.used:
                freed.discard(neighbour)
                block.absorb(neighbour)
        freed.add(block)

    def _is_small(self, size: int) -> bool:
        """Return whether a block lies in the pool of small blocks."""
        return size <= _SMALL

    def _freed_beside(self, block: Block) -> Freed:
        return self._freed[block.home.stream, block.home.small]
