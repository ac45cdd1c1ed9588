"""Differentiable keep-or-drop decisions: binary concrete gates from uniform numbers.

`P(keep) = sigmoid(logit)` asks for logistic noise: `logit + L > 0` with `L = log u - log(1 - u)`. A logistic number is the
difference of two Gumbel numbers; a single one in its place gives P(keep | logit 0) = 0.632. Drawing it from one uniform number
by the inverse of its distribution function is the same distribution for half of the random numbers.

Source: Maddison, Mnih and Teh 2017, "The Concrete Distribution", section 3.3 and appendix C.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["hard_bernoulli", "relaxed_bernoulli"]

_SMALLEST = 1e-7  # uniform numbers of fp32 are multiples of 2^-24; 0 would be infinite noise


def relaxed_bernoulli(logits: Tensor, *, uniform: Tensor, temperature: float) -> Tensor:
    """Return differentiable gates in (0, 1).

    A gate lies above 0.5 with probability `sigmoid(logits)`. Computed in place in one new tensor, the only one that
    the backward pass needs.

    Shapes:
        logits and uniform broadcast to the shape of the gates.

    Args:
        logits: Log-odds of keeping.
        uniform: Numbers from [0, 1), which get no gradient; the same number gives the same decision again.
        temperature: The lower, the closer the gates are to 0 and 1, and the rarer and larger their gradients.

    Raises:
        ValueError: If the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature} must be above 0, as in 0.5; for decisions of 0 and 1 use hard_bernoulli."
        )
    return _RelaxedBernoulli.apply(logits, uniform, temperature)


def hard_bernoulli(logits: Tensor, *, uniform: Tensor) -> Tensor:
    """Return decisions, True with probability `sigmoid(logits)`.

    A decision is True where `relaxed_bernoulli` of the same numbers is above 0.5.
    """
    with torch.no_grad():
        return _logistic(uniform, logits).add_(logits) > 0


def _logistic(uniform: Tensor, like: Tensor) -> Tensor:
    """Return logistic noise in `like`'s dtype and device, and the common shape of both."""
    shape = torch.broadcast_shapes(uniform.shape, like.shape)
    noise = torch.empty(shape, dtype=like.dtype, device=like.device)
    return noise.copy_(uniform).logit_(eps=_SMALLEST)


class _RelaxedBernoulli(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        logits, uniform, temperature = args
        gates = _logistic(uniform, logits).add_(logits).div_(temperature).sigmoid_()
        ctx.save_for_backward(gates)
        ctx.shape, ctx.temperature = logits.shape, temperature
        return gates

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gates,) = ctx.saved_tensors
        gradient = (1 - gates).mul_(gates).mul_(grad_outputs[0]).div_(ctx.temperature)
        return gradient.sum_to_size(ctx.shape), None, None
