"""A file whose written pages leave the cache while it is written."""

import io
import os
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_unified.files.pages import drop

__all__ = ["UncachedFile"]

_BEHIND = 16 * 2**20
"""Bytes after which written pages go to the disk and out of the cache.

Judgement: small beside any weights, and large enough that a wait for the disk costs little beside the writing.
"""


class UncachedFile(io.RawIOBase):
    """A new file that holds at most about `_BEHIND` bytes in the page cache.

    The system's own limit on unwritten pages is a share of all memory (20 % on Linux), which on a unified pool is the model's.

    Args:
        path: The file; it is created or emptied.
    """

    _descriptor = -1

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)
        self._unwritten = 0
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self._descriptor, getattr(fcntl, "F_NOCACHE", 48), 1)  # 48 in <sys/fcntl.h>

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._descriptor

    @override
    def write(self, data: Any, /) -> int:
        """Write all of `data` and return its bytes; a raw file may otherwise write fewer."""
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            done = os.write(self._descriptor, left[: _BEHIND - self._unwritten])
            left, self._unwritten = left[done:], self._unwritten + done
            if self._unwritten >= _BEHIND:
                self._drop_written(self._descriptor)
        return count

    @override
    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if descriptor >= 0:
                try:
                    self._drop_written(descriptor)
                finally:
                    os.close(descriptor)
        finally:
            super().close()

    def _drop_written(self, descriptor: int) -> None:
        getattr(os, "fdatasync", os.fsync)(descriptor)
        drop(descriptor)
        self._unwritten = 0
