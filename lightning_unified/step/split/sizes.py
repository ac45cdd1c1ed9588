"""Sizes of batches and of the micro-batches that they are split into."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.step.split.containers import tensors_in

__all__ = ["BatchShape", "bounds", "elements_per_row", "positions", "split_rows"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The size of a batch.

    Attributes:
        rows: The number of rows.
        elements: The tensor entries per row, which distinguish long rows from short ones.
    """

    rows: int
    elements: int = 0


def split_rows(rows: int, *, micro_batch_size: int, unit: int = 1, least: int = 1) -> list[int]:
    """Return the rows of each micro-batch, for the fewest micro-batches, as even as possible.

    Even micro-batches need less memory than full ones and a remainder, for the same number of passes. For instance, 10 rows in micro-batches
    of at most 4 become 4, 3, 3 and not 4, 4, 2.

    Args:
        rows: The number of rows of the whole batch.
        micro_batch_size: The rows of the largest micro-batch, at least `unit`.
        unit: The number of rows that stay together, such as the completions of one prompt.
        least: The rows that every micro-batch needs, even if some then exceed the size. BatchNorm has no statistics of one row.

    Raises:
        SplitError: If a split is needed and `rows` is not a multiple of `unit`.
    """
    if rows <= micro_batch_size:
        return [rows]
    if rows % unit:
        raise SplitError(
            f"a batch of {rows} rows cannot be split into units of {unit} rows (MicroBatchRules(unit={unit})); "
            f"use a batch size that is a multiple of {unit}, or drop_last=True."
        )
    units = rows // unit
    count = min(-(-units // (micro_batch_size // unit)), max(rows // max(least, unit), 1))
    return [unit * (units // count + (index < units % count)) for index in range(count)]


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first row of each micro-batch, and the row after its last."""
    return list(pairwise(accumulate(sizes, initial=0)))


def elements_per_row(batch: Any, rows: int) -> int:
    """Return the average number of tensor entries per row of `batch`.

    Only tensors with a first dimension of at least `rows` count.
    """
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and tensor.size(0) >= rows]
    return sum(tensor.numel() for tensor in tensors) // max(rows, 1)


def positions(batch: Any, rows: int) -> set[int]:
    """Return the numbers of positions that a row may have.

    A tensor of shape (rows, d1, d2, …) gives 1, d1, d1 * d2, and so on.
    """
    batched = [one for one in tensors_in(batch) if not one.is_nested and one.dim() and one.shape[0] == rows]
    return {math.prod(tensor.shape[1:end]) for tensor in batched for end in range(1, tensor.dim() + 1)}
