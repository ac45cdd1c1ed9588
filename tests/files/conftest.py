"""The page cache of a file, as the system counts it."""

import ctypes
import mmap
import os
import sys

import pytest


def _cached(path):
    """Return the bytes of a file that are in the page cache (mincore(2))."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        count = -(-len(pages) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        anchor = ctypes.c_char.from_buffer(pages)
        code = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(pages)), found)
        del anchor
    assert code == 0
    return sum(entry & 1 for entry in found) * mmap.PAGESIZE


def _leave_cache(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def cached(tmp_path):
    """A function that returns how many bytes of a file are in the page cache."""
    if sys.platform != "linux":
        pytest.skip("the page cache of a file is counted on Linux only")
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(mmap.PAGESIZE))
    _leave_cache(probe)
    if _cached(probe):
        pytest.skip("the file system of the temporary folder keeps its pages in memory")
    return _cached


@pytest.fixture
def cold():
    """A function that writes a file to the disk and out of the page cache."""
    return _leave_cache
