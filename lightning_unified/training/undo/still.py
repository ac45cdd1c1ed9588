"""Things that have not changed since they were looked at, and a quick way to tell whether that still holds."""

import ctypes
import operator
from collections.abc import Callable, Collection, Iterable, Sized
from itertools import chain
from typing import Any

from lightning_unified.training.undo.cells import Cell, MappingCell, are_same

__all__ = ["StillCells", "holds"]

_POINTER = ctypes.sizeof(ctypes.c_void_p)


class StillCells:
    """Cells with copies of their contents, which are good for as long as the cells hold the very same objects.

    A module has thousands of attributes, and next to none of them changes in a step. So they are not copied before every step: all
    that the cells hold is put into one tuple, and the addresses in it are compared with those of the tuple before, as bytes. That takes
    a fifth of a millisecond for 1,000 modules. Objects are never compared by `==`, which would run operations of tensors.

    Args:
        cells: With copies of their contents.
        empty: Dicts that hold nothing.
        counted: Collections of which only the length is looked at.
    """

    def __init__(self, cells: list[tuple[Cell, Any]], *, empty: list[Any], counted: Iterable[Sized]) -> None:
        self._cells, self._empty = cells, empty
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self._attributes: list[Any] = []
        self._entries: list[Collection[Any]] = []
        self._sized: list[Sized] = list(counted)
        for cell, noted in cells:
            if not noted:
                self._empty.append(cell.target)
            elif isinstance(cell, MappingCell) and cell.skip:
                names = tuple(noted) if len(noted) > 1 else tuple(noted) * 2  # of one name, no tuple would be had
                self._getters.append(operator.itemgetter(*names))
                self._attributes.append(cell.target)
                self._sized.append(cell.target)
            elif cell.style == "attribute":
                self._entries.append(cell.target.values())
            else:
                self._entries += [cell.target, cell.target.values()] if isinstance(noted, dict) else [cell.target]
                self._sized.append(cell.target)
        self._lengths = list(map(len, self._sized))
        self._addresses = self._read()

    def are_same(self) -> bool:
        """Return whether all cells hold what they held."""
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            return False
        try:
            return self._read() == self._addresses
        except (KeyError, RuntimeError):  # an attribute is gone, or another thread changes a container meanwhile
            return False

    def changed(self) -> list[Cell]:
        """Return the cells that do not hold what they held."""
        return [cell for cell, noted in self._cells if not holds(cell.copy(), noted)]

    def moved(self) -> list[tuple[Cell, Any]]:
        """Return the cells that do not hold what they held, each with what it held."""
        return [(cell, noted) for cell, noted in self._cells if not holds(cell.copy(), noted)]

    def restore(self) -> None:
        """Put every cell back."""
        if not self.are_same():
            for cell, noted in self._cells:
                cell.restore(noted)

    def _read(self) -> bytes:
        """Return the addresses of all entries; what is at an address cannot be another object, for the copies keep the objects alive."""
        call: Any = operator.call
        held = tuple(chain.from_iterable(chain(map(call, self._getters, self._attributes), self._entries)))
        return ctypes.string_at(id(held) + tuple.__basicsize__, _POINTER * len(held))


def holds(now: Any, noted: Any) -> bool:
    """Return whether two copies of a cell's contents hold the same objects in the same order."""
    if isinstance(noted, dict):
        return are_same(now, noted) and are_same(now.values(), noted.values())
    return are_same(now, noted)
