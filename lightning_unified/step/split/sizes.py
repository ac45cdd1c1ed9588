"""Sizes of batches and of the micro-batches that they are split into."""

import math
from dataclasses import dataclass
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.step.split.containers import tensors_in

__all__ = ["BatchShape", "elements_per_row", "part_sizes", "positions"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The size of a batch: `rows`, and `elements`, the entries of its tensors per row, which tells long rows from short ones."""

    rows: int
    elements: int = 0


def part_sizes(rows: int, *, limit: int, unit: int = 1, least: int = 1) -> list[int]:
    """Return the rows of each micro-batch: as few micro-batches as `limit` allows, of sizes as even as possible.

    Even micro-batches need less memory than full ones and a rest, for the same number of passes: 10 rows under a limit of 4 become
    4, 3, 3 and not 4, 4, 2.

    Args:
        rows: Rows of the whole batch.
        limit: The largest micro-batch, in rows, at least `unit`.
        unit: Rows that must stay together, such as the completions of one prompt.
        least: Rows that every micro-batch needs, even if some exceed the limit: BatchNorm has no statistics of one row.

    Raises:
        SplitError: If a split is needed and `rows` is no multiple of `unit`.
    """
    if rows <= limit:
        return [rows]
    if rows % unit:
        raise SplitError(
            f"a batch of {rows} rows cannot be split into units of {unit} rows (MicroBatchRules(unit={unit})); "
            f"use a batch size that is a multiple of {unit}, or drop_last=True."
        )
    units, parts = rows // unit, min(-(-(rows // unit) // (limit // unit)), max(rows // max(least, unit), 1))
    return [unit * (units // parts + (index < units % parts)) for index in range(parts)]


def elements_per_row(batch: Any, rows: int) -> int:
    """Return the entries per row of the tensors in `batch` that are as long as it, or longer; the average where rows differ."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() and tensor.size(0) >= rows]
    return sum(tensor.numel() for tensor in tensors) // max(rows, 1)


def positions(batch: Any, rows: int) -> set[int]:
    """Return the numbers of positions that a row may have: of each tensor (rows, T, …) T, and its products with the next dimensions."""
    batched = [one for one in tensors_in(batch) if not one.is_nested and one.dim() and one.shape[0] == rows]
    return {math.prod(tensor.shape[1:end]) for tensor in batched for end in range(1, tensor.dim() + 1)}
