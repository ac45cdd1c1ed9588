"""Differences of values that a step writes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.step.undo.changes import ABSENT

__all__ = ["are_whole_numbers", "difference", "is_number"]


def difference(before: Any, after: Any) -> Any:
    """Return the finite difference of two numbers, arrays or tensors of one shape, else None.

    The value itself is the difference from `ABSENT`.
    """
    if before is ABSENT:
        return _finite(after) if is_number(after) or isinstance(after, (Tensor, np.ndarray)) else None
    numbers = is_number(before) and is_number(after)
    tensors = (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.shape == after.shape
        and before.layout is after.layout is torch.strided
    )
    arrays = (
        isinstance(before, np.ndarray) and before.dtype.kind in "iufc" and getattr(after, "shape", None) == before.shape
    )
    if numbers or arrays or (tensors and before.dtype not in (torch.bool, torch.uint8)):
        return _finite(after - before)
    return None


def _finite(change: Any) -> Any:
    if isinstance(change, Tensor):
        if change.layout is not torch.strided:
            return None  # of sparse tensors, some operations are missing
        return change if change.dtype != torch.bool and torch.isfinite(change).all() else None
    if isinstance(change, np.ndarray) and change.dtype.kind not in "iufc":
        return None
    return change if np.isfinite(change).all() else None


def is_number(value: Any) -> bool:
    """Return whether `value` is a number of Python, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def are_whole_numbers(values: Sequence[Any]) -> bool:
    """Return whether all values are whole numbers."""
    return all(is_number(value) and float(value).is_integer() for value in values)
