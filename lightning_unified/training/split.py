"""Cutting a batch into micro-batches by rows, and putting what they return together again."""

import copy
import dataclasses
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

from lightning_unified.errors import SplitError

__all__ = [
    "BatchShape",
    "containers_copied",
    "cut",
    "elements_per_row",
    "merge",
    "num_rows",
    "part_sizes",
    "positions",
    "tensors_in",
]

_PLAIN = (str, bytes, int, float, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class BatchShape:
    """How large a batch is: `rows`, and `elements`, the entries of its tensors per row, which tells long rows from short ones."""

    rows: int
    elements: int = 0


def part_sizes(rows: int, *, limit: int, unit: int = 1, least: int = 1) -> list[int]:
    """Return how many rows each micro-batch gets: as few as `limit` allows, as even as can be.

    Even parts need less memory than full ones and a rest, for the same number of passes: 10 rows under a limit of 4 are
    4, 3, 3 and not 4, 4, 2.

    Args:
        rows: Rows of the whole batch.
        limit: The largest micro-batch, in rows, at least `unit`.
        unit: Rows that must stay together, such as the completions of one prompt.
        least: Rows that every micro-batch needs, even if some are then above the limit: BatchNorm has no statistics of one row.

    Raises:
        SplitError: If a split is needed and `rows` is no multiple of `unit`.
    """
    if rows <= limit:
        return [rows]
    if rows % unit:
        raise SplitError(
            f"a batch of {rows} rows cannot be cut into units of {unit} rows (MicroBatchRules(unit={unit})); "
            f"use a batch size that is a multiple of {unit}, or drop_last=True."
        )
    units, parts = rows // unit, min(-(-(rows // unit) // (limit // unit)), max(rows // max(least, unit), 1))
    return [unit * (units // parts + (index < units % parts)) for index in range(parts)]


def num_rows(batch: Any) -> int:
    """Return the rows of `batch`: the leading dimension that most of its entries have, the first one's if none is commoner.

    An entry is a tensor, a container of tensors of one leading dimension, a list of one element a row, or a `PackedSequence`. A
    batch of graphs says how many it holds (`num_graphs`, as torch_geometric's do).

    Raises:
        SplitError: If nothing in `batch` has a leading dimension.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return batch.shape[0]
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int) and not isinstance(batch, (Tensor, Mapping)):
        return graphs
    entries = _entries(batch)
    votes: dict[int, int] = {}
    for vote in (*map(_leading_dimension, entries), *(len(entry) for entry in entries if _is_sequence(entry))):
        if vote is not None:
            votes[vote] = votes.get(vote, 0) + 1
    if not votes and _is_sequence(batch):
        votes[len(batch)] = 1
    if not votes:
        raise SplitError(
            f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension, so it cannot be cut; "
            "declare MicroBatchRules(splittable=False) to run it whole."
        )
    return max(votes, key=votes.__getitem__)  # the first one of the commonest


def elements_per_row(batch: Any, rows: int) -> int:
    """Return the entries that the batched tensors of `batch` have per row, the average where rows differ."""
    total = 0
    for tensor in tensors_in(batch):
        if tensor.dim() and tensor.shape[0] >= rows:  # packed sequences have more entries than rows
            total += tensor.numel()
    return total // max(rows, 1)


def positions(batch: Any, rows: int) -> set[int]:
    """Return how many positions a row may have: of each batched tensor (rows, T, …) T, and the products with what follows it."""
    batched = [tensor for tensor in tensors_in(batch) if tensor.dim() and tensor.shape[0] == rows]
    return {math.prod(tensor.shape[1:end]) for tensor in batched for end in range(1, tensor.dim() + 1)}


def cut(batch: Any, start: int, stop: int, *, rows: int) -> Any:
    """Return rows `start` to `stop` of `batch` as the same structure, without copying any tensor but those of packed sequences.

    A leaf whose leading dimension is not `rows` is shared by every micro-batch, as are numbers, strings and None.
    A list or tuple of `rows` elements is one element a sample (strings, boxes, graphs), unless all tensors inside are batched.
    """
    if isinstance(batch, Tensor):
        return batch[start:stop] if _is_batched(batch, rows) else batch
    if isinstance(batch, Mapping):
        return _with_items(batch, {key: cut(value, start, stop, rows=rows) for key, value in batch.items()})
    if isinstance(batch, PackedSequence):
        return _cut_packed(batch, start, stop) if int(batch.batch_sizes[0]) == rows else batch
    if _is_sequence(batch):
        if len(batch) == rows and not _holds_columns(batch, rows):
            return batch[start:stop]
        parts = [cut(value, start, stop, rows=rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)  # type: ignore[call-arg]
    if _is_record(batch):
        return _with_fields(batch, lambda value: cut(value, start, stop, rows=rows))
    return batch


def merge(parts: Sequence[Any], *, sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    """Put what each micro-batch returned together as the undivided batch would have returned it.

    Whether a tensor has one entry a row is told by its leading dimension, so one that happens to be as long as its micro-batch,
    in every micro-batch, is taken for that.

    Args:
        parts: One value a micro-batch.
        sizes: Rows of each micro-batch.
        average: How a figure that describes a whole micro-batch (a scalar) becomes one of the whole batch.

    Returns:
        Tensors, arrays and lists with one entry a row are concatenated; floating-point figures are averaged; of anything else,
        and of what is not of one kind in all micro-batches, the last is kept.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return parts[-1]
    if isinstance(first, (Tensor, np.ndarray)):
        return _merge_arrays(parts, sizes, average)
    if isinstance(first, float):
        return average(parts)
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in part for part in parts)]
        merged = {key: merge([part[key] for part in parts], sizes=sizes, average=average) for key in keys}
        rest = {key: value for part in parts for key, value in part.items() if key not in merged}
        return _with_items(first, {**merged, **rest})
    if isinstance(first, PackedSequence):
        rows = [row for part in parts for row in unpack_sequence(part)]
        return pack_sequence(rows, enforce_sorted=all(part.sorted_indices is None for part in parts))
    if _is_sequence(first):
        pairs = list(zip(parts, sizes, strict=True))
        if all(len(part) == size for part, size in pairs) and not all(_holds_columns(*pair) for pair in pairs):
            return type(first)(value for part in parts for value in part)  # type: ignore[call-arg]
        if len({len(part) for part in parts}) > 1:
            return parts[-1]
        values = [merge(list(column), sizes=sizes, average=average) for column in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)  # type: ignore[call-arg]
    if _is_record(first):
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(first)}
        merged = iter([merge(column, sizes=sizes, average=average) for column in columns.values()])
        return _with_fields(first, lambda _: next(merged))
    return parts[-1]


def _merge_arrays(parts: Sequence[Any], sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    first = parts[0]
    if all(part.ndim and part.shape[0] == size for part, size in zip(parts, sizes, strict=True)):
        if all(part.shape[1:] == first.shape[1:] for part in parts):
            return torch.cat(list(parts)) if isinstance(first, Tensor) else np.concatenate(parts)
        return parts[-1]
    same_shape = all(part.shape == first.shape for part in parts)
    real = first.is_floating_point() if isinstance(first, Tensor) else first.dtype.kind == "f"
    return average(parts) if same_shape and real else parts[-1]


def _cut_packed(batch: PackedSequence, start: int, stop: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    in_order = batch.sorted_indices is None
    return pack_padded_sequence(padded[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=in_order)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence)


def _is_batched(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _holds_columns(value: Any, rows: int) -> bool:
    """Return whether the tensors inside `value` are all batched, so that its elements are columns of the batch and not its rows."""
    return _leading_dimension(value) == rows


def _leading_dimension(value: Any) -> int | None:
    """Return the leading dimension that all tensors in `value` share; None if they differ or have none."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    dimensions = set(_dimensions(value))
    return dimensions.pop() if len(dimensions) == 1 else None


def _dimensions(value: Any) -> Iterator[int]:
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])  # the tensors it consists of hold the entries of all rows
    elif isinstance(value, Tensor):
        yield from value.shape[:1]
    elif not _is_list_of_plain(value):
        for entry in _entries(value):
            yield from _dimensions(entry)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the mappings, lists, tuples and dataclasses of `value`, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif not _is_list_of_plain(value):
        for entry in _entries(value):
            if isinstance(entry, Tensor):
                yield entry
            else:
                yield from tensors_in(entry)


def containers_copied(value: Any) -> Any:
    """Return `value` with its dicts, lists and dataclasses copied and everything in them shared; other kinds are shared too."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return value
    if isinstance(value, (dict, UserDict)):
        return _with_items(value, {key: containers_copied(entry) for key, entry in value.items()})
    if type(value) is list or type(value) is tuple:
        return type(value)(value if _is_list_of_plain(value) else map(containers_copied, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(containers_copied, value))  # pyright: ignore[reportAttributeAccessIssue]
    if _is_record(value):
        return _with_fields(value, containers_copied)
    return value


def _is_list_of_plain(value: Any) -> bool:
    """Return whether `value` is a list of names or numbers; one entry a row makes it long, and a batch is looked at in every step."""
    if not _is_sequence(value) or not isinstance(next(iter(value), None), _PLAIN):
        return False
    return all(isinstance(entry, _PLAIN) for entry in value)


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    return [getattr(value, field.name) for field in dataclasses.fields(value)] if _is_record(value) else []


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _with_fields(record: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass with every field changed; made past `__init__`, which may want other arguments."""
    part = copy.copy(record)
    for field in dataclasses.fields(record):
        object.__setattr__(part, field.name, change(getattr(record, field.name)))
    return part


def _with_items(like: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the kind of `like` (dict, OrderedDict, BatchEncoding, …) that holds `items`."""
    if type(like) is dict:
        return items
    part = copy.copy(like)
    for key, value in items.items():
        part[key] = value
    return part
