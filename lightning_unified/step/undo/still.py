"""Skip objects that have not changed since the last look, by identity and dict versions."""

import functools
import sys
from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from operator import eq, getitem, is_
from typing import Any, NoReturn

import numpy as np

from lightning_unified.step.undo.cells import Cell, ClassCell, MappingCell, NamesCell, are_same

__all__ = ["DictVersions", "StillCells", "holds"]

_WORD = 8
_OFFSET = object.__basicsize__ + _WORD  # of a dict's version number: after the header and the count of entries


class DictVersions:
    """The version numbers of many dicts, read in one call.

    Reading them takes a sixth of the time that comparing the dicts' contents takes.

    CPython gives a dict a new number at each write, and no number occurs twice in a process. Equal numbers therefore mean that
    nothing was written. Where Python keeps no such numbers, as after 3.12, `moved` returns all dicts.

    Attributes:
        dicts: The dicts, which are kept alive.

    Args:
        dicts: Of the type `dict` itself.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self.dicts, self._kept = dicts, b""
        self._words = bytearray(_WORD * len(dicts))
        self._numbers = np.frombuffer(self._words, dtype=np.uint64)
        addresses = np.array([id(one) + _OFFSET for one in dicts], dtype=np.int64)
        self._memory, self._places = None, addresses
        if len(dicts) and _are_kept():
            self._memory = _memory_of(addresses)
            self._places = (addresses - addresses.min()) // _WORD

    def __reduce__(self) -> NoReturn:
        raise TypeError("versions of dicts belong to their process; they cannot be pickled or copied")

    def moved(self) -> Sequence[int]:
        """Read the versions, and return the indices of the dicts that were written.

        Writes count since the last `keep`. Without kept versions, all indices are returned.
        """
        if self._memory is not None:
            self._memory.take(self._places, None, self._numbers, "clip")
            if self._words == self._kept:
                return ()
            if self._kept:
                return np.flatnonzero(self._numbers != np.frombuffer(self._kept, np.uint64)).tolist()
        return range(len(self.dicts))

    @property
    def are_kept(self) -> bool:
        """Whether `keep` has kept versions."""
        return self._memory is not None and bool(self._kept)

    def keep(self) -> None:
        """Keep the versions that were read last."""
        self._kept = bytes(self._words)


class _Words:
    """Describes memory to NumPy as an array of 64-bit integers, without reading it."""

    def __init__(self, start: int, count: int) -> None:
        kind = np.dtype(np.uint64).str
        self.__array_interface__ = {"data": (start, True), "shape": (count,), "typestr": kind, "version": 3}


def _memory_of(addresses: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """Return the memory from the first of `addresses` to the last."""
    start = int(addresses.min())
    return np.asarray(_Words(start, (int(addresses.max()) - start) // _WORD + 1))


@functools.cache
def _are_kept() -> bool:
    """Return whether this Python stores dict versions at the expected address.

    The answer comes from a probe: each kind of write must change the number, and reads must not.
    """
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


_FEW = 64  # up to this number of written dicts, each is compared by itself


class StillCells:
    """Cells with copies of their contents, valid while the cells hold the very same objects.

    A module has thousands of attributes, and a step changes almost none of them. So they are not copied before every step. A dict whose
    version number has not moved holds the same objects. Written dicts and all other cells are compared with their copies. A dict that
    steps write without changing it is compared every time from then on.

    Args:
        cells: With copies of their contents.
        empty: Dicts that hold nothing.
        counted: Collections of which only the length is compared.
    """

    def __init__(self, cells: list[tuple[Cell, Any]], *, empty: list[Any], counted: Iterable[Sized]) -> None:
        self._cells, self._empty, self._counted = cells, empty, counted
        self._compared: set[int] = set()  # ids of dicts that steps write without a change
        self._arrange()

    def are_same(self) -> bool:
        """Return whether all cells still hold the same objects."""
        if not self._others.are_same():
            return False
        moved = self._versions.moved()
        if not moved:
            return True
        is_few = len(moved) <= _FEW
        hold = is_few and all(map(self._holds, moved))
        if not hold and not self._dicts.are_same():  # the order of attributes may differ
            return False
        if is_few and self._versions.are_kept:
            self._compared.update(id(self._versions.dicts[index]) for index in moved)
            self._arrange()
        else:
            self._versions.keep()  # read before the comparison: the next look sees a write during it
        return True

    def _arrange(self) -> None:
        """Separate dicts checked by version number from cells compared every time."""
        self._pairs = [pair for pair in self._cells if self._has_version(pair[0].target)]
        others = [pair for pair in self._cells if not self._has_version(pair[0].target)]
        empty = [one for one in self._empty if self._has_version(one)]
        self._dicts = _Copies(self._pairs, empty=empty)
        others_empty = [one for one in self._empty if not self._has_version(one)]
        self._others = _Copies(others, empty=others_empty, counted=self._counted)
        self._versions = DictVersions([*(cell.target for cell, _ in self._pairs), *empty])

    def _has_version(self, target: Any) -> bool:
        # the order of an OrderedDict can change without a write, so only plain dicts are checked by version
        return type(target) is dict and id(target) not in self._compared

    def _holds(self, index: int) -> bool:
        """Return whether the dict at `index` still has the contents of its copy."""
        if index >= len(self._pairs):
            return not self._versions.dicts[index]
        cell, noted = self._pairs[index]
        return holds(cell.copy(), noted)

    def moved(self) -> list[tuple[Cell, Any]]:
        """Return the cells with contents that differ from their copies, each with its copy."""
        return [(cell, noted) for cell, noted in self._cells if not holds(cell.copy(), noted)]

    def restore(self) -> None:
        """Restore the contents of every cell."""
        if not self.are_same():
            for cell, noted in self._cells:
                cell.restore(noted)


class _Copies:
    """Copies of the contents of cells, compared with the cells by identity.

    `==` would run tensor operations. The comparison runs in C and makes no list or tuple on the way: the first large allocation after a
    step takes longer than the comparison.
    """

    def __init__(self, cells: list[tuple[Cell, Any]], *, empty: list[Any], counted: Iterable[Sized] = ()) -> None:
        self._empty = [*empty]
        self._owners: list[Any] = []
        self._names: list[Any] = []  # of attributes: one for each entry of `_owners`
        self._attributes: list[Any] = []  # their values
        self._views: list[Iterable[Any]] = []
        self._entries: list[Any] = []  # their entries, one after another
        self._sized: list[Sized] = list(counted)
        for cell, noted in cells:
            owner = vars(cell.target) if isinstance(cell, ClassCell) else cell.target
            if not noted and not owner:  # attributes of the compiler may be there without being noted
                self._empty.append(owner)
                continue
            if not isinstance(cell, NamesCell):  # other names come and go beside its own
                self._sized.append(owner)
            if isinstance(cell, (ClassCell, NamesCell)) or (isinstance(cell, MappingCell) and cell.skip):
                self._owners += [owner] * len(noted)
                self._names += noted
                self._attributes += noted.values()
                continue
            if cell.style != "attribute":
                self._views.append(cell.target)
                self._entries += noted
            if isinstance(noted, dict):
                self._views.append(cell.target.values())
                self._entries += noted.values()
        self._lengths = list(map(len, self._sized))

    def are_same(self) -> bool:
        """Return whether all cells still hold the same objects."""
        if any(self._empty) or not all(map(eq, map(len, self._sized), self._lengths)):
            return False
        try:
            attributes = map(getitem, self._owners, self._names)
            entries = chain.from_iterable(self._views)
            return all(map(is_, attributes, self._attributes)) and all(map(is_, entries, self._entries))
        except (KeyError, RuntimeError):  # an attribute is gone, or another thread changes a container meanwhile
            return False


def holds(now: Any, noted: Any) -> bool:
    """Return whether two copies of a cell's contents hold the same objects in the same order."""
    if isinstance(noted, dict):
        return are_same(now, noted) and are_same(now.values(), noted.values())
    return are_same(now, noted)
