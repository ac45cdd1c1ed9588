"""Find the fields of a batch by path: tensors, arrays, and lists with an entry per row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_unified.step.split.containers import entries_of, is_sequence, joined

__all__ = ["arrays_of", "columns_of", "graphs_of", "leaf_at", "lengths_at", "lengths_of", "named_tensors"]

_LONG = 64  # a list with more entries holds rows, not fields


def named_tensors(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every leaf.

    Nested tensors are skipped. Lists of more than 64 entries are skipped too, because they hold rows.
    """
    if isinstance(batch, Tensor):
        if not batch.is_nested:
            yield path, batch
    elif not (is_sequence(batch) and len(batch) > _LONG):
        for name, entry in entries_of(batch) or ():
            yield from named_tensors(entry, joined(path, name))


def leaf_at(batch: Any, path: str) -> Tensor | None:
    """Return the tensor at `path`; None if the batch has no tensor there."""
    return next((tensor for name, tensor in named_tensors(batch) if name == path), None)


def graphs_of(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of every batch of graphs, and the batch of graphs."""
    if isinstance(getattr(batch, "num_graphs", None), int):
        yield path, batch
        return
    for name, entry in _fields(batch):
        yield from graphs_of(entry, joined(path, name))


_PLAIN = (str, int, type(None))  # bool is an int


def arrays_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path of every NumPy array of real numbers, and a tensor of its entries."""
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind in "iufb":
            yield path, _tensor_of(batch)
        return
    for name, entry in _fields(batch):
        yield from arrays_of(entry, joined(path, name))


def columns_of(batch: Any, rows: int, path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the path and the entries of every field with one text, integer or None per row."""
    if is_sequence(batch) and len(batch) == rows:
        yield from _columns(batch, path)
    elif isinstance(batch, np.ndarray) and batch.shape == (rows,) and batch.dtype.kind in "OU":
        yield from _columns(batch.tolist(), path)
    for name, entry in _fields(batch):
        yield from columns_of(entry, rows, joined(path, name))


def lengths_of(batch: Any, rows: int, path: str = "") -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the path and the length of every row's entry, for fields whose rows may have different lengths.

    These are lists with a tensor, an array or a list per row, also inside a dict or a tuple per row, packed sequences, and nested tensors.
    """
    if isinstance(batch, PackedSequence):
        steps = batch.batch_sizes.tolist()
        if steps and steps[0] == rows:
            yield path, [sum(size > row for size in steps) for row in range(rows)]
        return
    if isinstance(batch, Tensor):
        if batch.is_nested and batch.size(0) == rows:
            yield path, [len(row) for row in batch.unbind()]
        return
    if is_sequence(batch) and len(batch) == rows > 0:
        yield from _lengths(batch, path)
    for name, entry in _fields(batch):
        yield from lengths_of(entry, rows, joined(path, name))


def lengths_at(batch: Any, path: str) -> Sequence[int]:
    """Return the lengths that `lengths_of` finds at `path`; none where it finds none."""
    found = (lengths for rows in _numbers_of_rows(batch) for name, lengths in lengths_of(batch, rows) if name == path)
    return next(found, ())


def _numbers_of_rows(batch: Any) -> set[int]:
    """Return the lengths of all lists, packed sequences and nested tensors in a batch."""
    if isinstance(batch, PackedSequence):
        return {int(batch.batch_sizes[0])}
    if isinstance(batch, Tensor):
        return {batch.size(0)} if batch.is_nested else set()
    own = {len(batch)} if is_sequence(batch) else set()
    return own.union(*(_numbers_of_rows(entry) for _, entry in _fields(batch)))


def _lengths(rows: Sequence[Any], path: str) -> Iterator[tuple[str, Sequence[int]]]:
    first = rows[0] if rows else None
    if all(isinstance(row, (Tensor, np.ndarray)) and row.ndim > 0 for row in rows):
        yield path, [len(row) for row in rows]
    elif all(isinstance(row, Mapping) for row in rows):
        for name in first or ():
            yield from _lengths([row.get(name) for row in rows], joined(path, name))
    elif all(isinstance(row, (list, tuple)) for row in rows):
        if any(len(row) != len(first or ()) for row in rows) or all(
            isinstance(one, (int, float)) for one in first or ()
        ):
            yield path, [len(row) for row in rows]
        else:
            for index in range(min(len(first or ()), _LONG)):
                yield from _lengths([row[index] for row in rows], joined(path, index))


def _tensor_of(array: Any) -> Tensor:
    """Return a tensor that shares the memory of `array`, or a copy if tensors cannot share it."""
    dtype = np.dtype(np.float64) if array.dtype.kind == "f" and array.itemsize > 8 else array.dtype.newbyteorder("=")
    shares = array.flags.writeable and dtype == array.dtype and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if shares else np.array(array, dtype))


def _fields(batch: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(batch, (Tensor, str)) or (is_sequence(batch) and len(batch) > _LONG):
        return ()
    return list(entries_of(batch) or ())


def _columns(rows: Sequence[Any], path: str) -> Iterator[tuple[str, Sequence[Any]]]:
    if not rows:
        return
    first = rows[0]
    if all(isinstance(row, _PLAIN) for row in rows):
        yield path, rows
    elif all(isinstance(row, Tensor) and row.dim() == 0 and not _has_fraction(row) for row in rows):
        yield path, [row.item() for row in rows] if _are_apart(rows) else torch.stack(list(rows)).tolist()
    elif all(isinstance(row, Mapping) for row in rows):
        for name in first:
            yield from _columns([row.get(name) for row in rows], joined(path, name))
    elif all(isinstance(row, (list, tuple)) and len(row) == len(first) <= _LONG for row in rows):
        for index in range(len(first)):
            yield from _columns([row[index] for row in rows], joined(path, index))


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.device for tensor in tensors}) > 1


def _has_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
