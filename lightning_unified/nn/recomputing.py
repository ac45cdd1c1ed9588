"""Make blocks of a module recompute their activations, and nothing else about the module differ; undone exactly."""

import copy
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from lightning_unified.nn.checkpoint import recompute_call
from lightning_unified.nn.saved_attention import SavedAttention

__all__ = ["RecomputePolicy", "Recomputing", "is_recomputed"]

log = logging.getLogger("lightning_unified")

_FORWARD = "forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePolicy:
    """Which blocks of a module recompute their activations, and whether outputs of attention kernels are kept all the same.

    Some blocks are always the first ones. The peak is where the backward pass begins or where a block runs again. With the first
    blocks chosen, the backward pass has given back what all the others kept before one runs again; with the last ones, the first
    to run again does so on top of everything the others keep. benchmarks/recomputed_blocks.py compares first, last and spread.

    Attributes:
        blocks: How many, counted from the input on, or `"all"`.
        keep_attention: Whether the outputs of attention kernels (flash, memory-efficient, cuDNN) are kept, so that only what is
            around them runs twice.
        of: How many blocks there are, for people; None where that is not known.

    Raises:
        ValueError: If `blocks` is neither a count nor `"all"`.
    """

    blocks: int | Literal["all"]
    keep_attention: bool = False
    of: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        counts = isinstance(self.blocks, int) and not isinstance(self.blocks, bool) and self.blocks >= 0
        if not counts and self.blocks != "all":
            raise ValueError(f'blocks={self.blocks!r}: give how many blocks are recomputed, 0 or more, or "all".')

    @property
    def everything(self) -> bool:
        """Whether nothing is left to recompute."""
        return self.blocks == "all" and not self.keep_attention

    def choose(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return those of `blocks`, given in the order in which they run, that are recomputed."""
        return list(blocks if self.blocks == "all" else blocks[: self.blocks])

    def __str__(self) -> str:
        """Return it for people: `"none"`, `"6 of 12 blocks"`, `"all blocks, attention kept"`."""
        if self.blocks == 0:
            return "none"
        known = "" if self.of is None or self.blocks == "all" else f" of {self.of}"
        plural = "" if self.blocks == 1 and self.of is None else "s"
        return f"{self.blocks}{known} block{plural}{', attention kept' if self.keep_attention else ''}"


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
        keep_attention: Whether the outputs of attention kernels are kept, so that these do not run again. Where the first call of
            a block runs none (attention of plain products, as on MPS, or with a mask or dropout on a CPU), that is said once.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, keep_attention: bool = False) -> None:
        said: set[str] = set()
        self._stand_ins = [_StandIn(block, keep_attention=keep_attention, said=said) for block in blocks]
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


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a training call of `module` recomputes its activations, by `Recomputing` or by Hugging Face's own switch."""
    by_itself = vars(module).get("gradient_checkpointing") is True and module.training
    return by_itself or isinstance(vars(module).get(_FORWARD), _StandIn)


class _StandIn:
    """What is called in place of one block's `forward`; copied or saved, it is that `forward`."""

    def __init__(self, block: nn.Module, *, keep_attention: bool, said: set[str]) -> None:
        self._block = block
        self._keep_attention = keep_attention
        self._own = vars(block).get(_FORWARD)
        self._forward: Callable[..., Any] = block.forward
        self._on = True
        self._said = said

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
            self._say(
                f"is called in training with a {type(cache).__name__} that it may fill, which a second run would fill twice: it is not "
                "recomputed. Run the training step without a cache (use_cache=False)."
            )
            return self._forward(*args, **kwargs)
        if not self._keep_attention:
            return recompute_call(self._forward, args, kwargs, owner=block)
        kept = SavedAttention()
        result = recompute_call(self._forward, args, kwargs, owner=block, kept=kept)
        if not kept.count and not torch.compiler.is_compiling():
            self._say(
                "runs no attention kernel whose output could be kept (flash, memory-efficient, cuDNN): all of it is recomputed."
            )
        return result

    def _say(self, what: str) -> None:
        """Log what is the matter with this class of blocks, once for all of them."""
        text = f"{type(self._block).__name__} {what}"
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

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
