"""Versions of dicts: CPython 3.11 and 3.12 give each dict a number that every write changes (PEP 509)."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

__all__ = ["DictVersions"]

_WORD = 8
_OFFSET = object.__basicsize__ + _WORD  # of the number in a dict: after the object's head and the count of entries


class DictVersions:
    """The version numbers of many dicts, read in one call: a sixth of the time of a comparison of what the dicts hold.

    No number comes twice in a process, so equal numbers mean that nothing was written. A Python without such numbers, later than
    3.12, reports a change each time.

    Attributes:
        dicts: The dicts, which are kept alive.

    Args:
        dicts: Of the type `dict` itself.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts, self._kept = dicts, b""
        self._room = bytearray(_WORD * len(dicts))
        self._numbers = np.frombuffer(self._room, dtype=np.uint64)
        addresses = np.array([id(one) + _OFFSET for one in dicts], dtype=np.int64)
        self._memory, self._places = None, addresses
        if len(dicts) and _are_kept():
            self._memory = _memory_of(addresses)
            self._places = (addresses - addresses.min()) // _WORD

    def __reduce__(self) -> NoReturn:
        raise TypeError("versions of dicts belong to their process; they cannot be pickled or copied")

    def moved(self) -> Sequence[int]:
        """Read the versions; return the indices of the dicts that were written since versions were kept, of all if none were."""
        if self._memory is not None:
            self._memory.take(self._places, None, self._numbers, "clip")
            if self._room == self._kept:
                return ()
            if self._kept:
                return np.flatnonzero(self._numbers != np.frombuffer(self._kept, np.uint64)).tolist()
        return range(len(self.dicts))

    @property
    def are_kept(self) -> bool:
        """Whether versions were kept."""
        return self._memory is not None and bool(self._kept)

    def keep(self) -> None:
        """Keep the versions that were read last."""
        self._kept = bytes(self._room)


class _Words:
    """Describes memory to NumPy as whole numbers, which are read only where they are asked for."""

    def __init__(self, start: int, count: int) -> None:
        kind = np.dtype(np.uint64).str
        self.__array_interface__ = {"data": (start, True), "shape": (count,), "typestr": kind, "version": 3}


def _memory_of(addresses: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the memory from the first of `addresses` to the last."""
    start = int(addresses.min())
    return np.asarray(_Words(start, (int(addresses.max()) - start) // _WORD + 1))


@functools.cache
def _are_kept() -> bool:
    """Return whether this Python keeps such numbers where they are looked for: tried with writes of every way."""
    is_known = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 12)
    if not is_known or sys.maxsize < 1 << 32:
        return False

    class Probe:
        value: int

    probe = Probe()
    attributes = vars(probe)
    number = _memory_of(np.array([id(attributes) + _OFFSET], dtype=np.int64))
    seen = {int(number[0])}
    for count in range(32):  # often enough for the interpreter to specialise the assignment
        probe.value = count
        seen.add(int(number[0]))
    for write in (
        lambda: attributes.__setitem__("other", 1),
        lambda: attributes.update(other=2),
        lambda: attributes.pop("value"),
        lambda: delattr(probe, "other"),
    ):
        write()
        seen.add(int(number[0]))
    before = int(number[0])
    reads = (attributes.get("value"), len(attributes), list(attributes.items()))
    return len(seen) == 33 + 4 and int(number[0]) == before and bool(reads)
