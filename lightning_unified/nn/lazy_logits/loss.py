"""Cross-entropy of lazy logits, in chunks of rows."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_unified.nn.autograd_limits import only_first_derivative
from lightning_unified.nn.cross_entropy.chunks import Chunks, losses_of_rows, summed_loss
from lightning_unified.nn.cross_entropy.scored_labels import ScoredLabels, with_labels
from lightning_unified.nn.lazy_logits.replay import Loss, replayed, replayed_losses
from lightning_unified.nn.lazy_logits.source import HERE, NO_SECOND, Source, Step
from lightning_unified.nn.linear_cross_entropy import (
    IGNORED,
    gradients_in_forward,
    linear_cross_entropy,
    trains_only_hidden,
)

if TYPE_CHECKING:
    from lightning_unified.nn.lazy_logits.tensor import View

__all__ = ["cross_entropy"]


def cross_entropy(
    view: "View",
    target: Tensor,
    *,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of lazy logits; `dtype` is theirs."""
    with torch.set_grad_enabled(view.is_tracked and torch.is_grad_enabled()):
        hidden, labels = view.hidden.reshape(-1, view.hidden.shape[-1]), target.reshape(-1)
        loss = Loss(weight, ignore_index, label_smoothing)
        value = _reduced(view.source, hidden, labels, loss, view.shape[view.classes], reduction)
        value = only_first_derivative(value, *NO_SECOND)
        value = with_labels(value, ScoredLabels(labels=labels, ignore_index=ignore_index, weight=weight))
        view.source.call.losses.append(reduction)
        device = hidden.device.type
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            value = value.to(dtype)
        return value.reshape(target.shape) if reduction == "none" else value


def _reduced(source: Source, hidden: Tensor, labels: Tensor, loss: Loss, classes: int, reduction: str) -> Tensor:
    call, rows = source.call, source.call.rows
    factor, steps = _scale(source.steps)
    head: Any = call.head
    products = call.autocast or hidden.dtype
    if not call.is_linear or any(one.requires_grad for step in steps for one in step.tensors):
        return _reduce(replayed_losses(call, source.steps, hidden, labels, loss), labels, loss, reduction)
    if not all(step.widens(products) for step in steps) or not loss.is_plain:
        kernels = replayed(source.steps, loss)
        operands = {"hidden": hidden, "weight": head.weight, "bias": head.bias, "labels": labels}
        chunks = Chunks(**operands, rows=rows, dtype=products, kernels=kernels)
        only_hidden = trains_only_hidden(hidden, head.weight, head.bias)
        in_forward = reduction != "none" and (only_hidden or gradients_in_forward(rows))
        return _reduce(summed_loss(chunks) if in_forward else losses_of_rows(chunks), labels, loss, reduction)
    if loss.ignore_index != IGNORED:  # the label that is ignored elsewhere is an error here
        labels = labels.masked_fill(labels == IGNORED, classes).masked_fill(labels == loss.ignore_index, IGNORED)
    with torch.autocast(hidden.device.type, call.autocast, enabled=call.autocast is not None):
        return linear_cross_entropy(
            hidden if factor == 1 else hidden * factor,
            weight=head.weight,
            labels=labels,
            bias=head.bias if factor == 1 or head.bias is None else head.bias * factor,
            reduction=reduction,  # pyright: ignore[reportArgumentType]
            chunk_rows=rows,
        )


def _reduce(losses: Tensor, labels: Tensor, loss: Loss, reduction: str) -> Tensor:
    """Reduce the losses of all rows, or their sum."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else loss.mean(losses.sum(), labels)


def _scale(steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """Return the power of two that the first steps multiply by, and the other steps.

    A product with a power of two has no rounding, so the hidden states may be multiplied instead of the logits.
    """
    factor, left = 1.0, list(steps)
    while left:
        number = _number(left[0])
        if number is None or math.frexp(abs(number))[0] != 0.5:
            break
        factor *= number
        del left[0]
    return factor, left


def _number(step: Step) -> float | None:
    """Return the number that a step multiplies the logits by; None for any other step."""
    others = [value for value in step.args if value is not HERE]
    name = getattr(step.operation, "__name__", "").strip("_")
    if step.kwargs or len(others) != 1 or isinstance(others[0], bool) or not isinstance(others[0], (int, float)):
        return None
    if name in ("mul", "multiply", "rmul"):
        return float(others[0])
    is_quotient = name in ("div", "true_divide", "truediv") and step.args[0] is HERE and others[0]
    return 1 / others[0] if is_quotient else None
