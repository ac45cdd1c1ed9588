"""A model of CUDA's allocator with `expandable_segments:True`."""

from collections import defaultdict

from typing_extensions import override

from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Home, round_up

__all__ = ["ExpandableSegments"]

_ENDLESS = 2**60  # more addresses than any device has bytes


class ExpandableSegments(CudaSegments):
    """CUDA's allocator with `expandable_segments:True`.

    A stream has one range of addresses for its small blocks, and one for its large blocks. Physical pages are mapped into a range
    where blocks need them: 2 MiB each for blocks up to 1 MiB, 20 MiB for larger ones. A freed block is chosen by its size as in
    `CudaSegments`, except that the last block counts with all addresses behind it. A block that fits into no freed one goes to the
    lowest addresses that have enough room, with new pages between and behind freed blocks. Blocks are split to 512 bytes. `release`
    unmaps each page that has no block in use, so that free memory between blocks in use goes back to the driver too.

    Source:
        torch's CUDACachingAllocator.cpp: `get_free_block`, `find_expandable_block`, `try_allocate_expandable_block`, `map_block`,
        `unmap_block`, `should_split`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[tuple[int, bool], Home] = {}
        # addresses without pages, by the first; the last hole has no end
        self._holes: defaultdict[Home, dict[int, Block]] = defaultdict(dict)

    @override
    def reuse(self, size: int) -> Block | None:
        freed = self._freed[self._stream, self._is_small(size)]
        blocks = freed.from_size(size)
        found = next(blocks, None)
        if found is None:
            return None
        for other in blocks:
            if _expandable(other) >= _expandable(found):
                break
            found = other
        freed.discard(found)
        return self._split(found, size)

    @override
    def place(self, size: int, *, pressed: bool) -> Block:
        del pressed
        small = self._is_small(size)
        key = self._stream, small
        if key not in self._ranges:
            self._ranges[key] = Home(_ENDLESS, small=small, stream=self._stream)
            self._unmap(Block(_ENDLESS, self._ranges[key]))
        block = self._lowest_room(self._ranges[key], size)
        self._take(block, size)
        while block.size < size:
            assert block.after is not None
            self._take(block.after, size - block.size)
            block.absorb(block.after)
        return self._split(block, size)

    @override
    def release(self) -> None:
        for (_, small), freed in self._freed.items():
            page = self._page(small)
            for block in [*freed.blocks]:
                first, end = round_up(block.at, page), (block.at + block.size) // page * page
                if first < end:
                    freed.discard(block)
                    self._release(block, first, end)

    def _release(self, block: Block, first: int, end: int) -> None:
        """Unmap the pages from `first` to `end` in a block without use, and keep the rest of it."""
        self.reserved -= end - first
        hole = block.split_off(first - block.at) if block.at < first else block
        rest = hole.split_off(end - first) if hole.size > end - first else None
        self._unmap(hole)
        for part in (rest, None if hole is block else block):
            if part is not None:
                self._free(part)

    def _lowest_room(self, home: Home, size: int) -> Block:
        """Return the first of adjacent blocks without use that have `size` bytes together, at the lowest hole."""
        for _, hole in sorted(self._holes[home].items()):
            first = hole if hole.before is None or hole.before.used else hole.before
            room, block = 0, first
            while block is not None and not block.used and room < size:
                room, block = room + block.size, block.after
            if room >= size:
                return first
        raise AssertionError("the last hole has no end")

    def _take(self, block: Block, size: int) -> None:
        """Put a freed block in use, or as many pages of a hole as `size` bytes need."""
        if block.mapped:
            self._freed_beside(block).discard(block)
        else:
            del self._holes[block.home][block.at]
            pages = min(round_up(size, self._page(block.home.small)), block.size)
            self.reserved += pages
            block.mapped = True
            if pages < block.size:
                self._unmap(block.split_off(pages))
        block.used = True

    def _unmap(self, hole: Block) -> None:
        """Note addresses without pages, merged with the holes beside them."""
        hole.used = hole.mapped = False
        holes = self._holes[hole.home]
        for neighbour in (hole.before, hole.after):
            if neighbour is not None and not neighbour.mapped:
                del holes[neighbour.at]
                hole.absorb(neighbour)
        holes[hole.at] = hole

    def _page(self, small: bool) -> int:
        return self._SMALL_SEGMENT if small else self._LARGE_SEGMENT

    @override
    def _split(self, block: Block, size: int) -> Block:
        block.used = True
        if block.size - size >= self._ALIGNMENT:
            self._free(block.split_off(size))
        return block


def _expandable(block: Block) -> int:
    """Return the bytes of a freed block and of the hole behind it."""
    hole = block.after
    return block.size if hole is None or hole.mapped else block.size + hole.size
