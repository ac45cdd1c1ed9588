"""The changes of a step since its state was recorded, one at a time."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightning_unified.step.undo.cells import Cell, ListCell, LongCell, Path, path_text
from lightning_unified.step.undo.hooks import numbers_of_handles
from lightning_unified.step.undo.states import set_state, state_of
from lightning_unified.step.undo.tensors import version_of
from lightning_unified.step.undo.walk import FoundTensor
from lightning_unified.step.undo.watch import Noted

__all__ = ["ABSENT", "Change", "changes_since", "is_same", "moved_since", "versions_of"]

ABSENT = object()  # stands for an attribute or entry that does not exist
_OF_LIGHTNING = frozenset(vars(L.LightningModule())) - {"training"}
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One change.

    Args:
        path: The place of the change, as Python writes it.
        kind: `"entry"` of an attribute or container, `"tail"` appended to a list, `"members"` of a set, `"tensor"` or `"array"` written in
            place, or `"state"` of a generator.
        before: The value; an empty list for a tail, `ABSENT` where there was none, None for a tensor too large to keep.
        after: The value, or the entries that were appended.
        put: Writes a value there: `put(before)` takes the change back.
        limit: The largest number of entries of a deque; None for other values.
    """

    path: str
    kind: Literal["entry", "tail", "members", "tensor", "array", "state"]
    before: Any
    after: Any
    put: Callable[[Any], None]
    limit: int | None = None


def changes_since(noted: Noted) -> list[Change]:
    """Return every change since `noted`; slow, because it compares all values."""
    return _changes(noted, [] if noted.tensors is None else noted.tensors.copied)


def versions_of(noted: Noted) -> list[int]:
    """Return the version counters of the copied tensors, for `moved_since`."""
    return [] if noted.tensors is None else [version_of(entry.tensor) for entry, _ in noted.tensors.copied]


def moved_since(noted: Noted, versions: list[int], known: Collection[str]) -> list[Change]:
    """Return the changes since `noted` that can be found at little cost.

    Args:
        noted: The state before.
        versions: Version counters of the copied tensors then; tensors with the same counter are not compared.
        known: Paths of tensors that are compared in any case, because some writes move no counter.
    """
    tensors: list[tuple[FoundTensor, Tensor]] = []
    if noted.tensors is not None:
        pairs = zip(noted.tensors.copied, versions, strict=True)
        tensors = [
            (entry, copy)
            for (entry, copy), version in pairs
            if version_of(entry.tensor) != version or (known and path_text(entry.path) in known)
        ]
    return _changes(noted, tensors)


def _changes(noted: Noted, copied: Iterable[tuple[FoundTensor, Tensor]]) -> list[Change]:
    """Return the changes of cells, values, tensors without a copy, and the tensors in `copied`."""
    held: list[tuple[FoundTensor, None]] = []
    if noted.tensors is not None and (moved := noted.tensors.moved()):
        held = [(entry, None) for entry in noted.tensors.held if entry.slot in moved]
    found = [*_changed_cells(noted), *_changed_tensors(noted, [*copied, *held]), *_changed_values(noted)]
    return [*found, *_registered_hooks(noted, found)]


def _registered_hooks(noted: Noted, others: Iterable[Change]) -> Iterator[Change]:
    """Yield how many hooks the step has registered, the same for equal steps.

    A handle that the step keeps differs between equal steps, so it stays as the first micro-batch left it; and so does its hook.
    """
    held = frozenset(number for one in others for number in numbers_of_handles(one.after))
    for one in noted.hooks.registered(apart_from=held):
        yield Change(one.path, "entry", 0, len(one), one.put)


def _changed_cells(noted: Noted) -> Iterator[Change]:
    for cell, before in noted.moved_cells():
        if not _is_of_metric(noted, cell.path):
            yield from _changes_in(cell, before, cell.copy())


def _is_of_metric(noted: Noted, path: Path | None) -> bool:
    """Return whether `path` lies in a torchmetrics object; `results.metrics` merges its state."""
    while path is not None:
        if path_text(path) in noted.metric_paths:
            return True
        path = path[0]
    return False


def _changes_in(cell: Cell, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(cell, LongCell):
        if isinstance(cell.target, list) and after[0] > before[0]:
            yield _tail(cell, before[0])
    elif isinstance(cell, ListCell):
        if len(after) > len(before) and all(one is other for one, other in zip(before, after, strict=False)):
            yield _tail(cell, len(before))
        elif not is_same(before, after):
            yield Change(path_text(cell.path), "entry", before, after, cell.restore)
    elif isinstance(before, dict):
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name, ABSENT), after.get(name, ABSENT)
            is_ours = cell.style == "attribute" and name in _OF_LIGHTNING
            if old is not new and not is_ours and not (isinstance(old, _PLAIN) and is_same(old, new)):
                path = path_text((cell.path, name, cell.style))
                yield Change(path, "entry", old, new, partial(_put_entry, cell, name))
    elif isinstance(cell.target, set):
        if set(before) != set(after):
            yield Change(path_text(cell.path), "members", set(before), set(after), partial(_put_members, cell.target))
    elif not is_same(before, after):
        limit = getattr(cell.target, "maxlen", None)
        yield Change(path_text(cell.path), "entry", before, after, cell.restore, limit)


def _put_members(target: set[Any], value: set[Any]) -> None:
    target.clear()
    target.update(value)


def _tail(cell: Cell, length: int) -> Change:
    """Return the change of a list that has grown.

    Its path differs from that of the list, because a step may append in one batch and empty the list in another.
    """
    path = f"{path_text(cell.path)} at its end"
    return Change(path, "tail", [], list(cell.target[length:]), partial(_put_tail, cell.target, length))


def _put_tail(target: list[Any], length: int, value: list[Any]) -> None:
    target[length:] = value


def _put_entry(cell: Cell, name: Any, value: Any) -> None:
    if value is not ABSENT:
        cell.put(name, value)
    else:
        cell.remove(name)


def _changed_tensors(noted: Noted, entries: Iterable[tuple[FoundTensor, Tensor | None]]) -> Iterator[Change]:
    for entry, copy in entries:
        differs = copy is None or copy.shape != entry.tensor.shape or not torch.equal(copy, entry.tensor)
        if differs and not _is_of_metric(noted, entry.path):
            after = entry.tensor.detach().clone()
            yield Change(path_text(entry.path), "tensor", copy, after, partial(_put_tensor, entry.tensor))


def _put_tensor(tensor: Tensor, value: Tensor) -> None:
    with (
        torch.inference_mode(tensor.is_inference()),
        torch.no_grad(),
    ):  # in this order: `inference_mode(False)` turns gradients on
        tensor.copy_(value)


def _changed_values(noted: Noted) -> Iterator[Change]:
    """Yield changes of generators, and of arrays written in place."""
    for value, before, path in noted.states:
        after = state_of(value)
        if not is_same(before, after):
            yield Change(path_text(path), "state", before, after, partial(set_state, value))
    for array, before, path in noted.arrays:
        if not is_same(before, array):
            yield Change(f"{path_text(path)} in place", "array", before, array.copy(), partial(_put_array, array))


def _put_array(array: Any, value: Any) -> None:
    array[...] = value


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object or equal; tensors are compared by value."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        equal = one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (RuntimeError, TypeError, ValueError):
        return False
