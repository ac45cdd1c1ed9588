"""Record how a model computes its logits, without computing them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_unified.nn.lazy_logits.heads import autocast_dtype, lazy_output
from lightning_unified.nn.lazy_logits.source import HeadCall, Step
from lightning_unified.nn.lazy_logits.tensor import LazyLogits
from lightning_unified.nn.stand_in import FORWARD, StandIn

__all__ = ["LinearLogits", "UnknownLogitsError", "recorded_logits"]


class UnknownLogitsError(ValueError):
    """The logits are not a linear layer followed by element-wise operations.

    The text says why.
    """


@dataclass(frozen=True, slots=True, eq=False)
class LinearLogits:
    """Logits as `transform(linear(hidden, weight, bias))`, which nothing has computed.

    Attributes:
        hidden: The input of the output head (..., D), with its graph.
        weight: The weight of the head (V, D).
        bias: Its bias (V), if it has one.
        transform: The model's operations after the head, on logits (N, V); None for none.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    transform: Callable[[Tensor], Tensor] | None

    def computed(self) -> Tensor:
        """Return all logits."""
        logits = functional.linear(self.hidden, self.weight.to(self.hidden.dtype), self.bias)
        flat = logits.flatten(0, -2)
        return (flat if self.transform is None else self.transform(flat)).unflatten(0, logits.shape[:-1])


def recorded_logits(head: nn.Linear, run: Callable[[], Any]) -> LinearLogits:
    """Run a model whose head computes no logits, and return how it computes them.

    In the meantime the head returns lazy logits, which record the model's operations on them. The rest of the model runs as usual.

    Args:
        head: The output head.
        run: Runs the model, and returns its logits.

    Raises:
        UnknownLogitsError: If the model does more than record: it reads the logits, or does not return them.
    """
    stand_in = _Recorder(head)
    stand_in.install()
    try:
        logits = run()
    finally:
        stand_in.remove()
    if not isinstance(logits, LazyLogits):
        raise UnknownLogitsError(stand_in.why_not or "they do not come from the output of its head")
    view = logits.view_of_logits
    steps, products = view.source.steps, autocast_dtype(view.hidden.device.type) or view.hidden.dtype
    if any(tensor.requires_grad for step in steps for tensor in step.tensors):
        raise UnknownLogitsError("a trained tensor is applied after its head")
    if view.classes != len(view.shape) - 1:
        raise UnknownLogitsError("their last dimension is not the vocabulary")
    transform = None if all(step.widens(products) for step in steps) else _Steps(steps)
    return LinearLogits(view.hidden, head.weight, head.bias, transform)


class _Recorder(StandIn):
    """Replacement of a head's forward that always returns lazy logits."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head, FORWARD)
        self.why_not = ""

    def __call__(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            self.why_not = "its head is compiled; compile the blocks of the model alone"
            return self.function(hidden)
        call = _Unread(self.module, self.function, 1, autocast_dtype(hidden.device.type), set(), weakref.WeakSet())
        return lazy_output(call, hidden, is_tracked=False)


class _Unread(HeadCall):
    """A call of a head whose logits nobody may read."""

    @override
    def say(self, operation: str) -> NoReturn:
        raise UnknownLogitsError(f"{operation} reads the output of its head")


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    steps: tuple[Step, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits
