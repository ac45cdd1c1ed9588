"""Things that have not changed since they were looked at, and a quick way to tell whether that still holds."""

from collections.abc import Iterable, Sized
from itertools import chain
from operator import eq, is_
from typing import Any

from lightning_unified.training.undo.cells import Cell, MappingCell, are_same

__all__ = ["StillCells", "holds"]


class StillCells:
    """Cells with copies of their contents, which are good for as long as the cells hold the very same objects.

    A module has thousands of attributes, and next to none of them changes in a step. So they are not copied before every step, only
    compared with their copies, by identity: `==` would run operations of tensors. The comparison runs in C and makes no list or
    tuple on the way: the first large allocation after a step takes longer than the comparison.

    Args:
        cells: With copies of their contents.
        empty: Dicts that hold nothing.
        counted: Collections of which only the length is looked at.
    """

    def __init__(self, cells: list[tuple[Cell, Any]], *, empty: list[Any], counted: Iterable[Sized]) -> None:
        self._cells, self._empty = cells, empty
        self._owners: list[Any] = []
        self._names: list[Any] = []  # of an attribute of the owner in the same place
        self._attributes: list[Any] = []  # what it held
        self._views: list[Iterable[Any]] = []
        self._entries: list[Any] = []  # what these yielded, one after another
        self._sized: list[Sized] = list(counted)
        for cell, noted in cells:
            if not noted:
                self._empty.append(cell.target)
                continue
            self._sized.append(cell.target)
            if isinstance(cell, MappingCell) and cell.skip:
                self._owners += [cell.target] * len(noted)
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
        """Return whether all cells hold what they held."""
        if any(self._empty) or not all(map(eq, map(len, self._sized), self._lengths)):
            return False
        try:
            attributes = map(dict.__getitem__, self._owners, self._names)
            entries = chain.from_iterable(self._views)
            return all(map(is_, attributes, self._attributes)) and all(map(is_, entries, self._entries))
        except (KeyError, RuntimeError):  # an attribute is gone, or another thread changes a container meanwhile
            return False

    def changed(self) -> list[Cell]:
        """Return the cells that do not hold what they held."""
        return [cell for cell, _ in self.moved()]

    def moved(self) -> list[tuple[Cell, Any]]:
        """Return the cells that do not hold what they held, each with what it held."""
        return [(cell, noted) for cell, noted in self._cells if not holds(cell.copy(), noted)]

    def restore(self) -> None:
        """Put every cell back."""
        if not self.are_same():
            for cell, noted in self._cells:
                cell.restore(noted)


def holds(now: Any, noted: Any) -> bool:
    """Return whether two copies of a cell's contents hold the same objects in the same order."""
    if isinstance(noted, dict):
        return are_same(now, noted) and are_same(now.values(), noted.values())
    return are_same(now, noted)
