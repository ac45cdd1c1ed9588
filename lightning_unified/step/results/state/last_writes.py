"""Merge tensors of which micro-batches write some entries: the last write counts.

A step may write the rows of a memory bank (`self.bank[index] = features`). While micro-batches write different entries, the sum of their
changes is the whole batch's value too. It is not where two micro-batches write one entry. So checks learn this rule beside the sum of changes, and
a batch for which the two give different values is checked first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.sameness import same

__all__ = ["keeps_last_writes", "last_writes", "learn_last_writes"]

_LAST = "as written"


def learn_last_writes(
    table: MergeTable, path: str, before: Any, whole: Any, values: Sequence[Any], *, tolerance: float
) -> None:
    """Learn whether the last write of each entry counts.

    A micro-batch that changes all entries writes no part of a tensor, so the rule does not hold then.

    Args:
        table: The rules.
        path: The place of the values.
        before: The value from before the step.
        whole: The value that the whole batch wrote.
        values: The value that each micro-batch wrote; `before` if it wrote none.
        tolerance: Largest relative difference that counts as rounding.
    """
    key = _key(path)
    fits = (
        not (table.knows(key) and table.rule(key) is None)
        and all(_is_partial(before, value) for value in (whole, *values))
        and same(last_writes(before, values), whole, tolerance=tolerance)
    )
    if fits:
        table.note(key, _LAST)
    elif table.knows(key) or not _is_unchanged(before, whole):
        table.reject(key)
    table.unmergeable.discard(key)


def keeps_last_writes(table: MergeTable, path: str) -> bool:
    """Return whether the last write of each entry counted in all checks."""
    return table.rule(_key(path)) == _LAST


def last_writes(before: Any, values: Sequence[Any]) -> Any:
    """Return the value in which the last micro-batch that changes an entry decides it."""
    where: Any = torch.where if isinstance(before, Tensor) else np.where
    merged = before
    for value in values:
        merged = where(value != before, value, merged)
    return merged


def _is_partial(before: Any, after: Any) -> bool:
    """Return whether `after` is a tensor or an array that keeps an entry of `before`."""
    is_array = type(after) is type(before) and any(isinstance(after, kind) for kind in (Tensor, np.ndarray))
    if not is_array or after.shape != before.shape or after.dtype != before.dtype or after.ndim == 0:
        return False
    is_strided = all(getattr(one, "layout", torch.strided) is torch.strided for one in (before, after))
    return is_strided and bool((after == before).any())


def _is_unchanged(before: Any, after: Any) -> bool:
    return type(before) is type(after) and same(before, after)


def _key(path: str) -> str:
    return f"{path} (last)"
