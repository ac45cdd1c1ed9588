"""Merge results by the weights of a loss's summands, or as the loss itself."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.errors import SplitError

__all__ = ["AS_LOSS", "OF_SUMMANDS", "addends", "as_loss", "rules_of_summands"]

_MOST = 18  # a loss has fewer summands
_ROUNDING = {torch.float64: 1e-9, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_FLOAT32 = 1e-5

AS_LOSS = "as the loss"
"""The rule of values that are the loss of each micro-batch, up to one constant factor."""

OF_SUMMANDS = tuple(f"mean of summand {number}" for number in range(_MOST))
"""The rules of means weighted as one summand of the loss is."""


def rules_of_summands(whole: Any, summands: int) -> Sequence[str]:
    """Return the rules that may merge a value, if the loss has so many summands with weights of their own."""
    return (AS_LOSS, *OF_SUMMANDS[:summands]) if summands and _is_one_number(whole) else ()


def addends(rule: str, values: Sequence[Any], factors: Sequence[Sequence[float]]) -> list[Any]:
    """Return the numbers that a mean weighted as a summand adds up.

    Args:
        rule: The rule, one of `OF_SUMMANDS`.
        values: One for each micro-batch.
        factors: For each summand, the factors of the micro-batches.

    Raises:
        SplitError: If the loss has no such summand, or a micro-batch of it has no value.
    """
    number = OF_SUMMANDS.index(rule)
    if number >= len(factors):
        raise SplitError(
            f"values cannot be merged by {rule!r}: the loss has no such summand, or a micro-batch has no value of it"
        )
    pairs = [(value, factor) for value, factor in zip(values, factors[number], strict=True) if factor]
    return [value * factor for value, factor in pairs] or [value / len(values) for value in values]


def as_loss(values: Sequence[Any], losses: Sequence[float], loss: float) -> Any:
    """Return the whole batch's value of values that are the micro-batches' losses, up to one factor.

    Args:
        values: One for each micro-batch.
        losses: The loss of each.
        loss: The whole batch's loss.

    Raises:
        SplitError: If the values are not the losses.
    """
    if len(losses) != len(values):
        raise SplitError(f"values cannot be merged {AS_LOSS}: a micro-batch has none")
    pairs = [(float(value), own) for value, own in zip(values, losses, strict=True)]
    pairs = [pair for pair in pairs if not all(map(isnan, pair))]  # of no terms of a summand
    number, own = max(pairs, key=lambda pair: abs(pair[1]), default=(0.0, 0.0))
    factor = number / own if own else 1.0
    allowed = _rounding(values[0]) * max((abs(number) for number, _ in pairs), default=0.0)
    if not all(abs(number - factor * own) <= allowed for number, own in pairs):
        raise SplitError(f"values cannot be merged {AS_LOSS}: they are not the loss of each micro-batch")
    return _like(values[0], factor * loss)


def _rounding(value: Any) -> float:
    return _ROUNDING.get(value.dtype, _FLOAT32) if isinstance(value, Tensor) else _FLOAT32


def _like(value: Any, number: float) -> Any:
    """Return a number in the form of a value: a tensor, an array or a number."""
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    return np.full_like(value, number) if isinstance(value, np.ndarray) else type(value)(number)


def _is_one_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind == "f")
