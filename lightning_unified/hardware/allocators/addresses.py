"""Model the addresses of CUDA's segments.

Of two free blocks of one size the allocator takes the one with the lower address, so addresses decide which block is reused.
"""

from bisect import insort

from lightning_unified.units import MIB

__all__ = ["Addresses"]


class Addresses:
    """Addresses of a process, in bytes from the start of its first range.

    Later ranges lie below it. A segment goes to the lowest address with enough room among the holes in existing ranges.
    Otherwise a new range of whole 32 MiB pages begins below all others. The first range exists from the start: 512 MiB, of
    which 2 and 24 MiB are free, and another 414 MiB below them once a kernel has run. cuBLAS takes 64 MiB at its first
    product, from the driver and not from the caching allocator.

    Source:
        24 recordings of torch 2.11's allocator on an H200 under Linux (driver of CUDA 13): with these rules the order of
        segments, and so both peaks, equal the GPU's to the byte, except for 0.05 % in one. A library loaded in between can
        occupy a page.
    """

    _PAGE = 32 * MIB
    _FREE = ((414 * MIB, 2 * MIB), (488 * MIB, 24 * MIB))
    _AFTER_A_KERNEL = (0, 414 * MIB)
    _CUBLAS = 64 * MIB

    def __init__(self) -> None:
        self._lowest = 0
        self._holes = list(self._FREE)  # address, bytes
        self._computes = self._multiplies = False

    def place(self, size: int) -> int:
        """Return the address of a new segment of `size` bytes."""
        for index, (at, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index] = (at + size, room - size)
                return at
        taken = -(-size // self._PAGE) * self._PAGE
        self._lowest -= taken
        self._holes.insert(0, (self._lowest + size, taken - size))
        return self._lowest

    def compute(self) -> None:
        """Note that a kernel runs; the first one opens another hole."""
        if not self._computes:
            self._computes = True
            insort(self._holes, self._AFTER_A_KERNEL)

    def multiply(self) -> None:
        """Note that cuBLAS runs a product; the first one takes its own memory."""
        self.compute()
        if not self._multiplies:
            self._multiplies = True
            self.place(self._CUBLAS)
