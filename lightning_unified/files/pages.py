"""Give the page cache of a file back to the system, where it offers a call for that.

Linux has `posix_fadvise` for pages that no process maps, and `madvise(MADV_PAGEOUT)` for mapped ones (kernel 5.4). macOS has
`F_NOCACHE`, and an `madvise` that marks pages as the next to be reclaimed; both not run on hardware. Elsewhere nothing happens: the
pages stay until the system needs them.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["PIECE", "drop", "give_back_mapped", "opened_uncached"]

PIECE = 4 * 2**20
"""Bytes that are read, copied or dropped at a time: the page cache that a transfer takes.

Judgement: large enough for a disk's full speed, small beside any weights.
"""

# linux/mman.h: reclaim the pages without losing writes; <sys/mman.h> of macOS: expected not to be read soon
_ADVICE = {"linux": 21, "darwin": 4}


@contextmanager
def opened_uncached(path: Path) -> Iterator[int]:
    """Yield a descriptor to read `path`, and leave none of its pages in the page cache.

    Some systems cannot do that; there the pages stay.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(descriptor, getattr(fcntl, "F_NOCACHE", 48), 1)  # 48 in <sys/fcntl.h>
        yield descriptor
    finally:
        drop(descriptor)
        os.close(descriptor)


def drop(descriptor: int, end: int = 0) -> None:
    """Drop the pages of a file's first `end` bytes from the cache; of all bytes with 0.

    Always from the beginning: the system keeps pages in blocks of up to some MiB, and drops only blocks that lie within the range.
    Pages that are not on the disk yet, or that a process maps, stay.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)


def give_back_mapped(address: int, count: int) -> bool:
    """Release the whole pages among `count` bytes of mapped memory at `address`.

    Their content stays readable.

    Returns:
        Whether the system took the advice.
    """
    call = _madvise()
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + count) // mmap.PAGESIZE * mmap.PAGESIZE
    return call is not None and end > begin and call(begin, end - begin, _ADVICE[sys.platform]) == 0


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    if sys.platform not in _ADVICE:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if call is not None:
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call
