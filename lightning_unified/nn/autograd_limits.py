"""Limits of the package's autograd functions: second derivatives, transforms, hooks."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["has_hooks", "in_a_transform", "only_first_derivative", "refuse_second_derivative"]


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a hook of the tensor runs when it gets a gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def in_a_transform() -> bool:
    """Return whether a transform of `torch.func` runs.

    Its tensors take no autograd functions or tensor subclasses of this package.
    """
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise in a backward pass that is recorded for a second derivative.

    Without this, gradients of gradients would lack the operation's share.

    Args:
        what: The operation, as the subject of a sentence.
        instead: What to do, as an imperative.

    Raises:
        RuntimeError: If the backward pass runs with `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative (create_graph=True); {instead}.")


def only_first_derivative(result: Tensor, what: str, instead: str) -> Tensor:
    """Return `result`, whose backward pass refuses as `refuse_second_derivative` does."""
    return _OnlyFirst.apply(result, what, instead)  # pyright: ignore[reportReturnType]


class _OnlyFirst(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        result, *ctx.words = args
        return result.view_as(result)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        refuse_second_derivative(*ctx.words)
        return grad_outputs[0], None, None
