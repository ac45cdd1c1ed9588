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
    with_class_of,
    with_fields,
    with_items,
)

__all__ = ["merge"]


def merge(outputs: Sequence[Any], *, sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    """Merge the micro-batches' outputs into the whole batch's output.

    The first dimension decides whether a tensor has one entry per row. A tensor that is by chance as long as its micro-batch, in every
    micro-batch, therefore counts as one with an entry per row.

    Args:
        outputs: One for each micro-batch.
        sizes: The rows of each micro-batch.
        average: Returns the whole batch's value for the micro-batches' floating-point values.

    Returns:
        The merged output. Tensors, arrays and lists with one entry per row are concatenated, and other floating-point values are averaged.
        For all other values, and for values whose type differs among micro-batches, the last micro-batch's value is kept.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        return outputs[-1]
    if isinstance(first, (Tensor, np.ndarray)):
        return _merge_arrays(outputs, sizes, average)
    if isinstance(first, float):
        return average(outputs)
    if is_tensor_collection(first) and len(first.batch_size):
        by_row = all(output.batch_size[0] == size for output, size in zip(outputs, sizes, strict=True))
        return torch.cat(list(outputs)) if by_row else outputs[-1]
    if isinstance(first, Mapping):
        keys = [key for key in first if all(key in output for output in outputs)]
        merged = {key: merge([output[key] for output in outputs], sizes=sizes, average=average) for key in keys}
        rest = {key: value for output in outputs for key, value in output.items() if key not in merged}
        return with_items(first, {**merged, **rest})
    if isinstance(first, PackedSequence):
        rows = [row for output in outputs for row in unpack_sequence(output)]
        return pack_sequence(rows, enforce_sorted=all(output.sorted_indices is None for output in outputs))
    if isinstance(first, (list, tuple)):
        pairs = list(zip(outputs, sizes, strict=True))
        if all(len(output) == size for output, size in pairs) and not all(_holds_columns(*pair) for pair in pairs):
            return type(first)(value for output in outputs for value in output)  # type: ignore[call-arg]
        if len({len(output) for output in outputs}) > 1:
            return outputs[-1]
        values = [merge(list(column), sizes=sizes, average=average) for column in zip(*outputs, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)  # type: ignore[call-arg]
    if is_record(first):
        columns = {
            field.name: [getattr(output, field.name) for output in outputs] for field in dataclasses.fields(first)
        }
        merged = iter([merge(column, sizes=sizes, average=average) for column in columns.values()])
        return with_fields(first, lambda _: next(merged))
    return outputs[-1]


def _merge_arrays(outputs: Sequence[Any], sizes: Sequence[int], average: Callable[[Sequence[Any]], Any]) -> Any:
    first = outputs[0]
    if all(output.ndim and output.shape[0] == size for output, size in zip(outputs, sizes, strict=True)):
        if all(output.shape[1:] == first.shape[1:] for output in outputs):
            is_tensor = isinstance(first, Tensor)
            return with_class_of(first, torch.cat(list(outputs))) if is_tensor else np.concatenate(outputs)
        return outputs[-1]
    same_shape = all(output.shape == first.shape for output in outputs)
    real = first.is_floating_point() if isinstance(first, Tensor) else first.dtype.kind == "f"
    return average(outputs) if same_shape and real else outputs[-1]


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
