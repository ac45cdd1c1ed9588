"""Make blocks of a module recompute their activations, and nothing else about the module differ; undone exactly."""

import copy
import logging
import operator
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lightning_unified.nn.checkpoint import recompute_call

__all__ = ["Recomputing"]

log = logging.getLogger("lightning_unified")

_FORWARD = "forward"


class Recomputing:
    """Blocks that recompute their activations in the backward pass, in train mode and with gradients on, until `remove`.

    The `forward` of each block object is stood in for; its class, its place, its parameters, hooks and state-dict keys are as before,
    and so are copies: one made with `copy.deepcopy`, `pickle` or `torch.save` does not recompute. Hooks of a block run once; hooks of
    what is in it run in the second run as well, and so does what its forward does to lists and attributes of its own.

    A block that is given an empty cache of keys and values (`use_cache=True` makes Hugging Face's models do that in training) runs
    without it, for the second run would fill it again; their own gradient checkpointing does the same. One that is given a filled
    cache runs without recomputation, and that is said once.

    Use it as a context manager, or call `remove`.

    Args:
        blocks: None of them inside another.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._stand_ins = [_StandIn(block) for block in blocks]
        for stand_in in self._stand_ins:
            stand_in.install()

    def remove(self) -> None:
        """Give the blocks their `forward` back; once is enough, twice does no harm."""
        for stand_in in self._stand_ins:
            stand_in.remove()
        self._stand_ins = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


class _StandIn:
    """What is called in place of one block's `forward`; copied or saved, it is that `forward`."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._own = vars(block).get(_FORWARD)
        self._forward: Callable[..., Any] = block.forward
        self._on = True
        self._told = False

    def install(self) -> None:
        vars(self._block)[_FORWARD] = self

    def remove(self) -> None:
        self._on = False
        if vars(self._block).get(_FORWARD) is not self:
            return  # somebody has put theirs on top, which calls this one
        if self._own is None:
            del vars(self._block)[_FORWARD]
        else:
            vars(self._block)[_FORWARD] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        wanted = self._on and block.training and torch.is_grad_enabled()
        if not wanted or getattr(block, "gradient_checkpointing", False) is True:
            return self._forward(*args, **kwargs)
        args, kwargs = tuple(map(_unless_empty, args)), {name: _unless_empty(value) for name, value in kwargs.items()}
        cache = next((value for value in (*args, *kwargs.values()) if _is_cache(value)), None)
        if cache is not None:
            self._tell(cache)
            return self._forward(*args, **kwargs)
        return recompute_call(self._forward, args, kwargs, owner=block)

    def _tell(self, cache: Any) -> None:
        if not self._told:
            log.warning(
                "%s is called in training with a %s that it may fill, which a second run would fill twice: it is not recomputed. "
                "Run the training step without a cache (use_cache=False).",
                type(self._block).__name__,
                type(cache).__name__,
            )
        self._told = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self._forward,), 0)


def _is_cache(value: Any) -> bool:
    """Return whether `value` is an object that a block fills with keys and values; a tuple of tensors is not, for it cannot be filled."""
    return hasattr(value, "get_seq_length") or type(value).__name__.lower().endswith("cache")


def _unless_empty(value: Any) -> Any:
    """Return None for a cache that says it holds nothing yet (`transformers.Cache.get_seq_length`), else `value`."""
    return None if hasattr(value, "get_seq_length") and int(value.get_seq_length()) == 0 else value
