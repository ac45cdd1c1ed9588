"""Cutting a batch into micro-batches by rows, and putting what they return together again."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError

__all__ = ["cut", "merge", "num_rows", "part_sizes"]


def part_sizes(rows: int, *, limit: int, unit: int = 1) -> list[int]:
    """Return how many rows each micro-batch gets: as few as `limit` allows, as even as can be.

    Even parts need less memory than full ones and a rest, for the same number of passes: 10 rows under a limit of 4 are
    4, 3, 3 and not 4, 4, 2.

    Args:
        rows: Rows of the whole batch.
        limit: The largest micro-batch, in rows, at least `unit`.
        unit: Rows that must stay together, such as the completions of one prompt.

    Raises:
        SplitError: If a split is needed and `rows` is no multiple of `unit`.
    """
    if rows <= limit:
        return [rows]
    if rows % unit:
        raise SplitError(
            f"a batch of {rows} rows cannot be cut into units of {unit} rows (micro_batch_unit); "
            f"use a batch size that is a multiple of {unit}, or drop_last=True."
        )
    units, parts = rows // unit, -(-(rows // unit) // (limit // unit))
    return [unit * (units // parts + (index < units % parts)) for index in range(parts)]


def num_rows(batch: Any) -> int:
    """Return the rows of `batch`: the leading dimension of its first tensor, else the length of its first list of samples.

    Raises:
        SplitError: If nothing in `batch` has a leading dimension.
    """
    rows = _first(batch, lambda leaf: leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None)
    if rows is None:
        rows = _first(batch, lambda leaf: len(leaf) if _is_list_of_samples(leaf) else None)
    if rows is None:
        raise SplitError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it cannot be cut; "
            "set `splittable = False` on the module to run it whole."
        )
    return rows


def cut(batch: Any, start: int, stop: int, *, rows: int) -> Any:
    """Return rows `start` to `stop` of `batch` as the same structure, without copying any tensor.

    A leaf whose leading dimension is not `rows` is shared by every micro-batch, as are numbers, strings and None.
    A list or tuple of `rows` elements with no batched tensor inside is one element a sample (strings, boxes, graphs).
    """
    if isinstance(batch, Tensor):
        return batch[start:stop] if _is_batched(batch, rows) else batch
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: cut(value, start, stop, rows=rows) for key, value in batch.items()})
    if _is_sequence(batch):
        if len(batch) == rows and not _holds_batched_tensor(batch, rows):
            return batch[start:stop]
        parts = [cut(value, start, stop, rows=rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(part, field.name, cut(getattr(batch, field.name), start, stop, rows=rows))
        return part
    return batch


def merge(parts: Sequence[Any], *, sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    """Put what each micro-batch returned together as the undivided batch would have returned it.

    Args:
        parts: One value a micro-batch, all of one structure.
        sizes: Rows of each micro-batch.
        average: How a figure that describes a whole micro-batch (a scalar) becomes one of the whole batch.

    Returns:
        Tensors and lists with one entry a row are concatenated; scalars are averaged; of anything else the last is kept.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if all(_is_batched(part, size) for part, size in zip(parts, sizes, strict=True)):
            return torch.cat(list(parts))
        same_shape = all(part.shape == first.shape for part in parts)
        return average(parts) if same_shape and first.is_floating_point() else parts[-1]
    if isinstance(first, float):
        return average(parts)
    if isinstance(first, Mapping):
        merged = {key: merge([part[key] for part in parts], sizes=sizes, average=average) for key in first}
        return _with_items(first, merged)
    if _is_sequence(first):
        if all(len(part) == size for part, size in zip(parts, sizes, strict=True)) and not _holds_batched_tensor(
            first, sizes[0]
        ):
            return type(first)(value for part in parts for value in part)  # type: ignore[call-arg]
        values = [merge(list(column), sizes=sizes, average=average) for column in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)  # type: ignore[call-arg]
    return parts[-1]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_list_of_samples(value: Any) -> bool:
    return _is_sequence(value) and not any(_is_sequence(entry) or isinstance(entry, Mapping) for entry in value)


def _is_batched(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _holds_batched_tensor(value: Any, rows: int) -> bool:
    return _first(value, lambda leaf: True if _is_batched(leaf, rows) else None) is not None


def _first(value: Any, found: Callable[[Any], Any]) -> Any:
    """Return the first non-None `found(node)` over `value` and what it contains, depth first."""
    answer = found(value)
    if answer is not None:
        return answer
    children: Sequence[Any] = ()
    if isinstance(value, Mapping):
        children = list(value.values())
    elif _is_sequence(value):
        children = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for child in children:
        answer = _first(child, found)
        if answer is not None:
            return answer
    return None


def _with_items(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `like` (dict, OrderedDict, BatchEncoding, …) that holds `items`."""
    if type(like) is dict:
        return items
    part = copy.copy(like)
    for key, value in items.items():
        part[key] = value
    return part
