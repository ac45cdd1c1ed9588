"""What a step has changed since its state was noted, one change at a time: where, from what, to what, and how to write it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_unified.training.undo.cells import Cell, ListCell, LongCell, path_text
from lightning_unified.training.undo.states import set_state, state_of
from lightning_unified.training.undo.watch import Noted

__all__ = ["ABSENT", "Change", "changes_since", "moved_since", "versions_of"]

ABSENT = object()  # an attribute or entry that is not there
_OF_LIGHTNING = frozenset(vars(L.LightningModule())) - {"training"}
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One change.

    Args:
        path: Where, as Python writes it.
        kind: `"entry"` of an attribute or container, `"tail"` that a list has grown by, `"tensor"` written in place, or `"state"` of a
            generator.
        before: The value; for a tail nothing; `ABSENT` where there was none, None for a tensor too large to keep.
        after: The value, or what was appended.
        put: Writes a value there: `put(before)` takes the change back.
    """

    path: str
    kind: Literal["entry", "tail", "tensor", "state"]
    before: Any
    after: Any
    put: Callable[[Any], None]


def changes_since(noted: Noted) -> list[Change]:
    """Return every change since `noted`; compares all values, which takes a while."""
    return [*_changed_cells(noted), *_changed_tensors(noted, _tensors(noted)), *_changed_states(noted)]


def versions_of(noted: Noted) -> list[int]:
    """Return the version counters of the tensors noted, to be given to `moved_since`."""
    return [_version(entry.tensor) for entry, _ in _tensors(noted)]


def moved_since(noted: Noted, versions: list[int], known: Callable[[str], bool]) -> list[Change]:
    """Return the changes since `noted` that can be seen at little cost, before every micro-batch.

    Args:
        noted: The state before.
        versions: Of the tensors then; those whose counters have not moved are not compared.
        known: Whether a path is known to change, so that it is compared all the same.
    """
    pairs = zip(_tensors(noted), versions, strict=True)
    moved = [
        (entry, room)
        for (entry, room), version in pairs
        if _version(entry.tensor) != version or known(path_text(entry.path))
    ]
    return [*_changed_cells(noted), *_changed_tensors(noted, moved), *_changed_states(noted)]


def _tensors(noted: Noted) -> list[tuple[Any, Tensor | None]]:
    return [] if noted.tensors is None else noted.tensors.entries


def _changed_cells(noted: Noted) -> Iterator[Change]:
    metrics = noted.cells_of(Metric)
    for cell, before in noted.moved_cells():
        if not any(id(cell.target) == one or path_text(cell.path).startswith(prefix) for one, prefix in metrics):
            yield from _changes_in(cell, before, cell.copy())


def _changes_in(cell: Cell, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(cell, LongCell):
        if isinstance(cell.target, list) and after[0] > before[0]:
            yield _tail(cell, before[0])
    elif isinstance(cell, ListCell):
        if len(after) > len(before) and all(one is other for one, other in zip(before, after, strict=False)):
            yield _tail(cell, len(before))
        elif not _is_same(before, after):
            yield Change(path_text(cell.path), "entry", before, after, cell.restore)
    elif isinstance(before, dict):
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name, ABSENT), after.get(name, ABSENT)
            is_ours = cell.style == "attribute" and name in _OF_LIGHTNING
            if old is not new and not is_ours and not (isinstance(old, _PLAIN) and _is_same(old, new)):
                path = path_text((cell.path, name, cell.style))
                yield Change(path, "entry", old, new, partial(_put_entry, cell, name))
    elif not _is_same(before, after):
        yield Change(path_text(cell.path), "entry", before, after, cell.restore)


def _tail(cell: Cell, length: int) -> Change:
    return Change(path_text(cell.path), "tail", [], list(cell.target[length:]), partial(_put_tail, cell.target, length))


def _put_tail(target: list[Any], length: int, value: list[Any]) -> None:
    target[length:] = value


def _put_entry(cell: Cell, name: Any, value: Any) -> None:
    if value is not ABSENT:
        cell.put(name, value)
    elif isinstance(cell.target, dict):
        cell.target.pop(name, None)


def _changed_tensors(noted: Noted, entries: Iterable[tuple[Any, Tensor | None]]) -> Iterator[Change]:
    metrics = noted.cells_of(Metric)
    for entry, room in entries:
        path = path_text(entry.path)
        if any(entry.slot[0] == one or path.startswith(prefix) for one, prefix in metrics):
            continue
        if room is None or room.shape != entry.tensor.shape or not torch.equal(room, entry.tensor):
            yield Change(path, "tensor", room, entry.tensor.detach().clone(), partial(_put_tensor, entry.tensor))


def _put_tensor(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.copy_(value)


def _changed_states(noted: Noted) -> Iterator[Change]:
    for value, before in noted.states:
        after = state_of(value)
        if not _is_same(before, after):
            path = f"{type(value).__name__} at {id(value):#x}"
            yield Change(path, "state", before, after, partial(set_state, value))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (RuntimeError, TypeError, ValueError):
        return False
