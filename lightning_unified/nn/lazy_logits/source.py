"""The recorded computation of logits: a call of an output head, and the operations after it."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.nn.stand_in import warn_once

__all__ = ["HERE", "NO_SECOND", "HeadCall", "Source", "Step", "trained_by"]

HERE = object()  # the place of the logits among the arguments of a step
NO_SECOND = "the loss in chunks", "set memory.loss_chunk=false for this module"  # of second derivatives


@dataclass(frozen=True, slots=True)
class Step:
    """An element-wise operation on logits (N, V) and its other arguments."""

    operation: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the other arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def widens(self, products: torch.dtype) -> bool:
        """Return whether the step only casts half precision to float32.

        Chunks are computed in float32 anyway. `products` is the dtype of the head's output.
        """
        if products.itemsize > 2:
            return False
        is_cast = self.operation is torch.Tensor.to and torch.float32 in (*self.args, *self.kwargs.values())
        return self.operation is torch.Tensor.float or is_cast

    def __call__(self, logits: Tensor, swaps: Mapping[int, Tensor] | None = None) -> Tensor:
        """Return the operation's result; `swaps` replaces tensors by their `id`."""
        swaps = swaps or {}
        args = [logits if value is HERE else swaps.get(id(value), value) for value in self.args]
        return self.operation(*args, **{name: swaps.get(id(value), value) for name, value in self.kwargs.items()})


@dataclass(frozen=True, slots=True, eq=False)
class HeadCall:
    """A call of an output head, under the autocast of its time.

    Attributes:
        head: The output head.
        forward: Its forward, bound to it.
        rows: Rows of logits that a chunked loss computes at one time.
        autocast: The dtype of autocast; None where autocast is off.
        said: Texts that were logged already.
        alive: The sources that someone still holds.
        losses: The reductions of the losses that were computed in chunks.
    """

    head: nn.Module
    forward: Callable[[Tensor], Tensor]
    rows: int
    autocast: torch.dtype | None
    said: set[str]
    alive: "weakref.WeakSet[Source]"
    losses: list[str] = field(default_factory=list)

    @property
    def is_linear(self) -> bool:
        """Whether the call is `linear(hidden, head.weight, head.bias)`."""
        return isinstance(self.head, nn.Linear) and type(self.head).forward is nn.Linear.forward

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the head that are trained."""
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]

    def __call__(self, hidden: Tensor, *, caches: bool = True) -> Tensor:
        """Return the logits of `hidden`; `caches` lets autocast keep its copies of weights."""
        device = hidden.device.type
        if not torch.amp.is_autocast_available(device):
            return self.forward(hidden)
        dtype, enabled = self.autocast or torch.get_autocast_dtype(device), self.autocast is not None
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=caches and torch.is_autocast_cache_enabled()):
            return self.forward(hidden)

    @contextlib.contextmanager
    def swapped(self, swaps: Mapping[int, Tensor]) -> Iterator[None]:
        """Put other tensors in the place of the head's parameters, by their `id`, inside the block."""
        places = [(child._parameters, dict(child._parameters)) for child in self.head.modules()]
        for held, own in places:
            for name, parameter in own.items():
                if id(parameter) in swaps:
                    held[name] = swaps[id(parameter)]  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            for held, own in places:
                held.update(own)

    def say(self, operation: str) -> None:
        """Log once that an operation reads the logits."""
        warn_once(
            self.said,
            f"{operation} reads the logits of {type(self.head).__name__}, so all of them are computed. The chunked loss "
            "(memory.loss_chunk) saves memory only where cross_entropy is the one reader.",
        )


def trained_by(call: HeadCall, steps: Sequence[Step]) -> list[Tensor]:
    """Return the tensors beside the hidden states that get gradients, each once."""
    found = [*call.parameters, *(one for step in steps for one in step.tensors if one.requires_grad)]
    return list({id(one): one for one in found}.values())


@dataclass(eq=False, weakref_slot=True, slots=True)
class Source:
    """The computation of logits of one shape; views of these logits share it.

    Attributes:
        call: The call of the head.
        hidden: Its input, in the shape of the logits but for the last dimension.
        steps: The operations after the call.
        shape: The shape of the logits.
        real: The logits with their graph, once they are computed.
        settled: The logits without a graph, computed before a change of weights.
    """

    call: HeadCall
    hidden: Tensor
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    real: Tensor | None = None
    settled: Tensor | None = None
    _versions: tuple[tuple[bool, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = self._versions_now()
        self.call.alive.add(self)

    @property
    def trained(self) -> list[Tensor]:
        """The tensors beside the hidden states that get gradients."""
        return trained_by(self.call, self.steps)

    @property
    def is_current(self) -> bool:
        """Whether no tensor of the computation was written or sharded since the forward pass."""
        return self._versions == self._versions_now()

    def computed(self) -> Tensor:
        """Return the logits with their graph; they are computed once.

        After a change of weights, the result is `settled`.

        Raises:
            RuntimeError: If weights have changed and the logits were not computed before.
        """
        if self.real is not None:
            return self.real
        if self.is_current:
            with torch.enable_grad():
                self.real = self.logits_of(self.hidden, self.shape)
            return self.real
        if self.settled is None:
            raise RuntimeError(
                f"the logits of {type(self.call.head).__name__} are read after its weights were changed, and they were not computed before. "
                "Read them before the change, or set memory.loss_chunk=false."
            )
        return self.settled

    def logits_of(self, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the logits of some hidden states in a shape."""
        logits = self.call(hidden)
        if self.steps:
            logits = logits.reshape(-1, logits.shape[-1])
            for step in self.steps:
                logits = step(logits)
        return logits.reshape(shape)

    def settle(self) -> None:
        """Compute the logits without a graph: their weights are about to change."""
        if self.real is None and self.settled is None and self.is_current:
            self.call.say("a reference held until the optimizer's step")
            with torch.no_grad():
                self.settled = self.logits_of(self.hidden, self.shape)

    def _versions_now(self) -> tuple[tuple[bool, int], ...]:
        """Return for each tensor whether it is sharded, and how often it was written."""
        tensors = (self.hidden, *self.call.head.parameters(), *(one for step in self.steps for one in step.tensors))
        return tuple((is_traceable_wrapper_subclass(one), 0 if one.is_inference() else one._version) for one in tensors)
