"""Merge the gradients that tensors keep beside their values.

Leaves of a graph keep theirs, and activations after `retain_grad()`.
The backward pass of a micro-batch writes its share of the whole batch's gradient. So the gradients of rows lie one after another, and those
of a tensor that each micro-batch makes again add up.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_unified.step.split.containers import tensors_in

__all__ = ["awaits_gradient", "copy_gradients", "gradients_of"]


def gradients_of(values: Sequence[Any]) -> list[Tensor] | None:
    """Return the gradients that all tensors of `values` have kept; None if one has none."""
    found = [_gradient(value) for value in values]
    kept = [one for one in found if one is not None]
    return kept if len(kept) == len(found) else None


def awaits_gradient(value: Any) -> bool:
    """Return whether a backward pass is yet to write a gradient that `value` keeps."""
    return any(one.requires_grad and _keeps(one) and one.grad is None for one in tensors_in(value))


def copy_gradients(source: Any, target: Any) -> None:
    """Give the tensors in `target` the gradients of those in `source`, an equal value."""
    for one, other in zip(tensors_in(source), tensors_in(target), strict=True):
        if (gradient := _gradient(one)) is not None:
            other.grad = gradient


def _keeps(tensor: Tensor) -> bool:
    return tensor.is_leaf or tensor.retains_grad


def _gradient(value: Any) -> Tensor | None:
    return value.grad if isinstance(value, Tensor) and _keeps(value) else None
