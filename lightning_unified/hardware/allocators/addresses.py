"""At which addresses CUDA's driver puts segments: of two free blocks of one size the lower one is taken, so that they decide what is reused."""

from bisect import insort

from lightning_unified.units import MIB

__all__ = ["Addresses"]


class Addresses:
    """The addresses of a process, in bytes from where its first range begins; ranges that follow lie below it.

    A segment goes to the lowest place it fits in, among those left free in ranges that the driver has; else a range of whole pages of 32 MiB
    is begun below all others. The first range is there from the start: 512 MiB, of which 2 and 24 MiB are free, and another 414 MiB below
    them once a kernel has run. cuBLAS takes 64 MiB for itself when its first product runs, of the driver and not of the caching allocator.

    Source:
        24 recordings of torch 2.11's allocator on an H200 under Linux (driver of CUDA 13): with these rules their segments' order, and so
        the two peaks, are those of the GPU, to the byte but for 0.05 % in one. A library that is loaded in between can hold a page.
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
        """Let the first kernel run, if none has."""
        if not self._computes:
            self._computes = True
            insort(self._holes, self._AFTER_A_KERNEL)

    def multiply(self) -> None:
        """Let cuBLAS run its first product, if none has run."""
        self.compute()
        if not self._multiplies:
            self._multiplies = True
            self.place(self._CUBLAS)
