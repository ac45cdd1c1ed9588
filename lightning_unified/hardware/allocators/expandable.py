"""Model CUDA's expandable segments: one growing address range for small blocks, one for large."""

from typing_extensions import override

from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Freed, Home, round_up
from lightning_unified.units import MIB

__all__ = ["ExpandableSegments"]


class ExpandableSegments(CudaSegments):
    """CUDA's allocator with `expandable_segments:True`.

    Blocks lie in two segments that are mapped as needed: 2 MiB at a time for blocks up to 1 MiB, 20 MiB at a time for larger
    ones. Every block is split to the requested size. The free end of a segment counts as larger than any other block, because
    it can grow. `release` unmaps the free end only; torch unmaps free pages in the middle as well.

    Source:
        torch's CUDACachingAllocator.cpp: `get_free_block`, `try_allocate_expandable_block`, `map_block`, `should_split`.
    """

    _SMALL_BLOCK, _SMALL_PAGE, _LARGE_PAGE = 1 * MIB, 2 * MIB, 20 * MIB

    def __init__(self, *, divisions: int = 0) -> None:
        super().__init__(divisions=divisions)
        self._unmapped = {small: self._segment(small=small) for small in (True, False)}

    @override
    def growth(self, size: int, *, pressed: bool) -> int:
        small = size <= self._SMALL_BLOCK
        end = self._free_end(small=small)
        return round_up(size - (0 if end is None else end.size), self._page(small=small))

    @override
    def place(self, size: int, *, pressed: bool) -> Block:
        small = size <= self._SMALL_BLOCK
        more = self.growth(size, pressed=pressed)
        unmapped, end = self._unmapped[small], self._free_end(small=small)
        if end is None:
            end = Block(0, unmapped.home, unmapped.at)
            end.insert_before(unmapped)
        else:
            self._freed[small].discard(end)
        end.size += more
        unmapped.at += more
        self.reserved += more
        return self._split(end, size)

    @override
    def release(self) -> None:
        for small, unmapped in self._unmapped.items():
            end = self._free_end(small=small)
            if end is not None:
                self._freed[small].discard(end)
                kept = min(end.size, round_up(end.at, self._page(small=small)) - end.at)
                self.reserved -= end.size - kept
                unmapped.at = end.at + kept
                self._shorten(end, kept)

    @override
    def _best(self, freed: Freed, size: int) -> Block | None:
        block = freed.smallest(size)
        if block is not None and block.after is self._unmapped[block.home.small]:
            return freed.larger(block) or block
        return block

    @override
    def _splits(self, rest: int, size: int, *, small: bool) -> bool:
        return rest >= self._ALIGNMENT

    def _segment(self, *, small: bool) -> Block:
        """Return a block for the unmapped addresses; it is never freed, so no block merges with it."""
        return Block(0, Home(0, small=small))

    def _page(self, *, small: bool) -> int:
        return self._SMALL_PAGE if small else self._LARGE_PAGE

    def _free_end(self, *, small: bool) -> Block | None:
        end = self._unmapped[small].before
        return None if end is None or end.used else end

    def _shorten(self, end: Block, kept: int) -> None:
        end.size = kept
        if kept:
            self._freed[end.home.small].add(end)
            return
        unmapped = self._unmapped[end.home.small]
        unmapped.before = end.before
        if end.before is not None:
            end.before.after = unmapped
