"""Model a Linux process's resident memory: glibc's main heap and separate mappings."""

from lightning_unified.hardware.allocators.pools import Block, Freed, Home, round_up
from lightning_unified.units import KIB, MIB

__all__ = ["HostHeap"]


class HostHeap:
    """torch's CPU tensors in glibc: 64-byte aligned blocks in one growing heap, or in mappings.

    - A block of at least the threshold has a mapping of its own, which is unmapped when freed. The threshold is 128 KiB; it
      grows to the size of the largest mapping ever freed, up to 32 MiB.
    - A smaller block takes the smallest hole that also has room for its alignment. So a tensor seldom returns to the hole
      left by one of its own size.
    - The heap's free end goes back to the system once it reaches twice the threshold.
    - Pages count from their first write.

    Small allocations of libraries and Python between the tensors keep holes from merging. The model puts something small that
    stays after every fifth block placed into a hole. That number is fitted (`benchmarks/cost_model/resident_memory.py`); everything else
    follows the source.

    Not modelled: heaps of other threads, memory of libraries, blocks never written, huge pages.

    Args:
        threshold: Fixed `M_MMAP_THRESHOLD`; None models the C library's moving threshold.

    Source:
        glibc's malloc.c (2.36): `_int_memalign`, `sysmalloc`, `_int_free`, `systrim`; torch's alloc_cpu.cpp for the
        alignment.
    """

    _ALIGNMENT, _HEADER, _LEAST, _PAGE = 64, 16, 32, 4 * KIB
    _PAD, _FIRST_THRESHOLD, _LAST_THRESHOLD, _WORTH_TRIMMING = 128 * KIB, 128 * KIB, 32 * MIB, 64 * KIB
    _PINNED, _PIN = 5, 64

    def __init__(self, *, threshold: int | None = None) -> None:
        self._heap = Home(0, small=True)
        self._top = Block(0, self._heap)  # marked in use: `_lower_top` merges free blocks beside it
        self._break = 0
        self._touched = 0
        self._mapped = 0
        self._fixed = threshold is not None
        self._threshold = self._FIRST_THRESHOLD if threshold is None else threshold
        self._trim = 2 * self._FIRST_THRESHOLD if threshold is None else self._FIRST_THRESHOLD
        self._splits = 0
        self._freed = Freed()

    @property
    def reserved(self) -> int:
        """Resident bytes."""
        return self._touched + self._mapped

    def rounded(self, size: int) -> int:
        return max(self._LEAST, round_up(size + 8, 16))

    def reuse(self, size: int) -> Block | None:
        hole = self._freed.smallest(self._wanted(size))
        if hole is None:
            return None
        self._freed.discard(hole)
        return self._split(hole, size)

    def growth(self, size: int, *, pressed: bool) -> int:
        del pressed  # the heap grows alike whether memory is short or not
        wanted = self._wanted(size)
        if wanted >= self._threshold and wanted > self._break - self._top.at:
            return round_up(wanted, self._PAGE)
        return max(0, round_up(self._top.at + wanted, self._PAGE) - self._touched)

    def place(self, size: int, *, pressed: bool) -> Block:
        del pressed
        wanted = self._wanted(size)
        if wanted >= self._threshold and wanted > self._break - self._top.at:
            mapping = Block(round_up(self._wanted(size), self._PAGE), Home(0, small=False))
            self._mapped += mapping.size
            return mapping
        if wanted > self._break - self._top.at:
            self._break = round_up(self._top.at + wanted + self._PAD, self._PAGE)
        hole = Block(self._kept(size), self._heap, self._top.at)
        hole.insert_before(self._top)
        self._top.at += hole.size
        self._touched = max(self._touched, round_up(self._top.at, self._PAGE))
        return hole

    def give_back(self, block: Block) -> None:
        block.used = False
        if block.home is not self._heap:
            self._mapped -= block.size
            if not self._fixed and self._threshold < block.size <= self._LAST_THRESHOLD:
                self._threshold, self._trim = block.size, 2 * block.size
            return
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.used:
                self._freed.discard(neighbour)
                block.absorb(neighbour)
        self._freed.add(block)
        size = block.size
        self._lower_top()
        if size >= self._WORTH_TRIMMING and self._break - self._top.at >= self._trim:
            self._give_end()

    def release(self) -> None:
        """Free the heap's end, as `malloc_trim` does; holes inside stay resident."""
        self._give_end()

    def _wanted(self, size: int) -> int:
        """Return the hole size that fits an aligned block wherever the hole begins."""
        return self._kept(size) + self._HEADER

    def _kept(self, size: int) -> int:
        """Return the bytes a block takes of the heap, fewer than `_wanted`."""
        return size + self._ALIGNMENT + self._LEAST + self._HEADER

    def _split(self, hole: Block, size: int) -> Block:
        """Return the block of `size` in `hole`; the rest stays free.

        At times a small block that stays lies between the two.
        """
        hole.used = True
        kept = self._kept(size)
        self._splits += 1
        if hole.size - kept >= self._LEAST:
            rest = hole.split_off(kept)
            if self._splits % self._PINNED == 0 and rest.size >= self._PIN + self._LEAST:
                rest = rest.split_off(self._PIN)
            rest.used = False
            self._freed.add(rest)
        return hole

    def _lower_top(self) -> None:
        """Move the start of the heap's end down to its last free block."""
        last = self._top.before
        if last is not None and not last.used:
            self._freed.discard(last)
            self._top.at, self._top.before = last.at, last.before
            if last.before is not None:
                last.before.after = self._top

    def _give_end(self) -> None:
        self._break = min(self._break, round_up(self._top.at + self._LEAST + self._PAD, self._PAGE))
        self._touched = min(self._touched, self._break)
