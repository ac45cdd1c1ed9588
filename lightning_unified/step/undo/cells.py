"""Cells: restorable contents of attributes, containers, closures and globals."""

import functools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_unified.errors import UndoError
from lightning_unified.step.undo.kinds import Kind

__all__ = [
    "LARGEST",
    "Cell",
    "ClassCell",
    "ClosureCell",
    "LongCell",
    "MappingCell",
    "NamesCell",
    "Path",
    "SlotsCell",
    "are_same",
    "cells_of",
    "path_text",
]

LARGEST = (
    100_000  # entries of the largest container that is copied; of a larger one only the length, and a list's last entry
)

Path = tuple[Any, ...]  # where a value was found: (path of its container, its name there, style of writing the name)


def path_text(path: Path) -> str:
    """Return `path` as Python writes it, e.g. `Net.net.0.running_mean` or `Net.queues['a']`."""
    parent, name, style = path
    if parent is None or style == "global":
        return str(name)
    return f"{path_text(parent)}.{name}" if style == "attribute" else f"{path_text(parent)}[{name!r}]"


class Cell:
    """A container of values, with a way to copy and restore its contents.

    Args:
        target: The container itself; it keeps its identity.
        path: Where it was found.
        style: How a path writes its entries: `"attribute"`, `"item"` or `"global"`.
        skip: Names of entries that others record.
    """

    __slots__ = ("path", "skip", "style", "target")

    def __init__(self, target: Any, path: Path, *, style: str = "item", skip: frozenset[str] = frozenset()) -> None:
        self.target, self.path, self.style, self.skip = target, path, style, skip

    def copy(self) -> Any:
        """Return a copy of the present contents."""
        raise NotImplementedError

    def restore(self, noted: Any) -> None:
        """Restore the contents that `copy` returned."""
        raise NotImplementedError

    def entries(self, noted: Any) -> Iterable[tuple[Any, Any]]:
        """Return the names and values in a copy."""
        raise NotImplementedError

    def put(self, name: Any, value: Any) -> None:
        """Replace one entry."""
        self.target[name] = value

    def remove(self, name: Any) -> None:
        """Remove one entry, if the container can be without it."""


class MappingCell(Cell):
    """A dict of any kind, or the attributes of an object."""

    __slots__ = ()

    def copy(self) -> dict[Any, Any]:
        skip = self.skip
        if skip:
            return {name: value for name, value in self.target.items() if name not in skip}
        return dict.copy(self.target)

    def restore(self, noted: dict[Any, Any]) -> None:
        target = self.target
        if self.skip:
            for name in [name for name in target if name not in noted and name not in self.skip]:
                del target[name]
            target.update(noted)
            return
        if are_same(target.values(), noted.values()) and are_same(target, noted):
            return
        base: Any = OrderedDict if isinstance(target, OrderedDict) else dict  # bypasses methods of derived classes
        base.clear(target)
        for name, value in noted.items():
            base.__setitem__(target, name, value)

    def entries(self, noted: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
        return iter(noted.items())

    def remove(self, name: Any) -> None:
        self.target.pop(name, None)


class NamesCell(MappingCell):
    """Some names of a dict, such as the globals that a function uses."""

    __slots__ = ("names",)

    def __init__(self, target: dict[str, Any], path: Path, names: Iterable[str], *, style: str = "item") -> None:
        super().__init__(target, path, style=style)
        self.names = tuple(names)

    @property
    def lacks_names(self) -> bool:
        """Whether some of the names have no value yet."""
        return not all(map(self.target.__contains__, self.names))

    def copy(self) -> dict[Any, Any]:
        return {name: self.target[name] for name in self.names if name in self.target}

    def restore(self, noted: dict[Any, Any]) -> None:
        for name in self.names:
            if name in noted:
                self.target[name] = noted[name]
            else:
                self.target.pop(name, None)


class ClassCell(Cell):
    """The attributes of a user's class, except methods and other descriptors."""

    __slots__ = ()

    def __init__(self, kind: type, path: Path) -> None:
        super().__init__(kind, path, style="attribute")

    def copy(self) -> dict[str, Any]:
        attributes = dict(vars(self.target))
        return {name: value for name, value in attributes.items() if not (name.startswith("__") or _is_method(value))}

    def restore(self, noted: dict[str, Any]) -> None:
        now = self.copy()
        for name in now.keys() - noted.keys():
            self.remove(name)
        for name, value in noted.items():
            if now.get(name) is not value:
                self.put(name, value)

    def entries(self, noted: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
        return noted.items()

    def put(self, name: Any, value: Any) -> None:
        type.__setattr__(self.target, name, value)

    def remove(self, name: Any) -> None:
        if name in vars(self.target):
            type.__delattr__(self.target, name)


def _is_method(value: Any) -> bool:
    return isinstance(value, type) or hasattr(type(value), "__get__")


class ListCell(Cell):
    """A list."""

    __slots__ = ()

    def copy(self) -> list[Any]:
        return list.copy(self.target)

    def restore(self, noted: list[Any]) -> None:
        if not are_same(self.target, noted):
            list.__setitem__(self.target, slice(None), noted)

    def entries(self, noted: list[Any]) -> Iterable[tuple[Any, Any]]:
        return enumerate(noted)


class BagCell(Cell):
    """A set or a deque."""

    __slots__ = ()

    def copy(self) -> list[Any]:
        return list(self.target)

    def restore(self, noted: list[Any]) -> None:
        if are_same(self.target, noted):
            return
        base: Any = deque if isinstance(self.target, deque) else set
        base.clear(self.target)
        (base.extend if base is deque else base.update)(self.target, noted)

    def entries(self, noted: list[Any]) -> Iterable[tuple[Any, Any]]:
        return enumerate(noted)

    def put(self, name: Any, value: Any) -> None:
        if isinstance(self.target, deque):
            self.target[name] = value


class LongCell(Cell):
    """A container with too many entries to copy.

    It can be restored only if it is a list that has grown at its end.
    """

    __slots__ = ()

    def copy(self) -> tuple[int, Any]:
        length = len(self.target)
        return length, self.target[length - 1] if isinstance(self.target, list) else None

    def restore(self, noted: tuple[int, Any]) -> None:
        length, last = noted
        if isinstance(self.target, list) and len(self.target) > length and self.target[length - 1] is last:
            del self.target[length:]
        if self.copy()[0] != length or self.copy()[1] is not last:
            raise UndoError(
                f"memory ran out in a step that changed {path_text(self.path)}, a {type(self.target).__name__} of {length:,} entries; containers of "
                f"more than {LARGEST:,} entries are not copied, so the step cannot be repeated exactly. Resume from the last checkpoint, and "
                "change such a container in on_train_batch_end, or let it grow at its end only."
            )

    def entries(self, noted: Any) -> Iterable[tuple[Any, Any]]:  # noqa: ARG002
        return ()


class SlotsCell(Cell):
    """The attributes of an object that has slots."""

    __slots__ = ()

    def copy(self) -> dict[str, Any]:
        return {name: getattr(self.target, name) for name in _slots_of(type(self.target)) if hasattr(self.target, name)}

    def restore(self, noted: dict[str, Any]) -> None:
        for name in _slots_of(type(self.target)):
            if name in noted:
                self.put(name, noted[name])
            elif hasattr(self.target, name):
                object.__delattr__(self.target, name)

    def entries(self, noted: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
        return noted.items()

    def put(self, name: Any, value: Any) -> None:
        object.__setattr__(self.target, name, value)  # bypasses a frozen dataclass's own `__setattr__`


class ClosureCell(Cell):
    """A closure variable: a function shares it with the function around it."""

    __slots__ = ()

    def copy(self) -> list[Any]:
        try:
            return [self.target.cell_contents]
        except ValueError:  # not assigned yet
            return []

    def restore(self, noted: list[Any]) -> None:
        if noted:
            self.target.cell_contents = noted[0]
        elif self.copy():
            del self.target.cell_contents

    def entries(self, noted: list[Any]) -> Iterable[tuple[Any, Any]]:
        return ((self.path[1], value) for value in noted)

    def put(self, name: Any, value: Any) -> None:  # noqa: ARG002
        self.target.cell_contents = value


def cells_of(value: Any, kind: Kind, path: Path) -> list[Cell]:
    """Return the cells of `value`, a container or an object: its entries and attributes."""
    cells: list[Cell] = []
    if kind in _CELLS:
        cells.append((LongCell if len(value) > LARGEST else _CELLS[kind])(value, path))
    elif _slots_of(type(value)):
        cells.append(SlotsCell(value, path, style="attribute"))
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and (attributes or kind is Kind.OBJECT):
        cells.append(MappingCell(attributes, path, style="attribute"))
    return cells


_CELLS: dict[Kind, type[Cell]] = {
    Kind.MAPPING: MappingCell,
    Kind.LIST: ListCell,
    Kind.SET: BagCell,
    Kind.DEQUE: BagCell,
}


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of `kind` and its bases, as they are stored."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def are_same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Return whether two iterables yield the same objects in the same order."""
    now, before = tuple(now), tuple(before)
    return len(now) == len(before) and all(map(operator.is_, now, before))
