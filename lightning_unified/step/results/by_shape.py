"""Merge values without a known rule: by their first dimension, else by their mean."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_unified.step.split.containers import (
    entries_of,
    is_list_of_plain,
    is_record,
    is_tensor_collection,
    with_fields,
    with_items,
)

__all__ = ["merge"]


def merge(parts: Sequence[Any], *, sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    """Merge the micro-batches' outputs into the whole batch's output.

    The first dimension decides whether a tensor has one entry per row. A tensor that is by chance as long as its micro-batch, in every
    micro-batch, therefore counts as one with an entry per row.

    Args:
        parts: The outputs, one per micro-batch.
        sizes: The rows of each micro-batch.
        average: Returns the whole batch's value for the micro-batches' floating-point values.

    Returns:
        The merged output. Tensors, arrays and lists with one entry per row are concatenated, and other floating-point values are averaged.
        For all other values, and for values whose type differs among micro-batches, the last micro-batch's value is kept.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return parts[-1]
    if isinstance(first, (Tensor, np.ndarray)):
        return _merge_arrays(parts, sizes, average)
    if isinstance(first, float):
        return average(parts)
    if is_tensor_collection(first) and len(first.batch_size):
        by_row = all(part.batch_size[0] == size for part, size in zip(parts, sizes, strict=True))
        return torch.cat(list(parts)) if by_row else parts[-1]
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in part for part in parts)]
        merged = {key: merge([part[key] for part in parts], sizes=sizes, average=average) for key in keys}
        rest = {key: value for part in parts for key, value in part.items() if key not in merged}
        return with_items(first, {**merged, **rest})
    if isinstance(first, PackedSequence):
        rows = [row for part in parts for row in unpack_sequence(part)]
        return pack_sequence(rows, enforce_sorted=all(part.sorted_indices is None for part in parts))
    if isinstance(first, (list, tuple)):
        pairs = list(zip(parts, sizes, strict=True))
        if all(len(part) == size for part, size in pairs) and not all(_holds_columns(*pair) for pair in pairs):
            return type(first)(value for part in parts for value in part)  # type: ignore[call-arg]
        if len({len(part) for part in parts}) > 1:
            return parts[-1]
        values = [merge(list(column), sizes=sizes, average=average) for column in zip(*parts, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)  # type: ignore[call-arg]
    if is_record(first):
        columns = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(first)}
        merged = iter([merge(column, sizes=sizes, average=average) for column in columns.values()])
        return with_fields(first, lambda _: next(merged))
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


def _holds_columns(value: Any, rows: int) -> bool:
    """Return whether all tensors in `value` have `rows` rows, so that its entries are columns."""
    return set(_first_dimensions(value)) == {rows}


def _first_dimensions(value: Any) -> Iterator[int]:
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])  # its own tensors hold the entries of all rows
    elif isinstance(value, Tensor):
        yield from value.shape[:1]
    elif not is_list_of_plain(value):
        for _, entry in entries_of(value) or ():
            yield from _first_dimensions(entry)
