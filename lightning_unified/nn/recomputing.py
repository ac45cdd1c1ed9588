"""Switch activation checkpointing of a module's blocks on and off, without any other change."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from lightning_unified.nn.attention.saved import SavedAttention
from lightning_unified.nn.autograd_limits import in_a_transform
from lightning_unified.nn.checkpoint import recompute_call
from lightning_unified.nn.compiled import COMPILED_CALL, is_compiled, mark_rows
from lightning_unified.nn.second_run.runs import Calls
from lightning_unified.nn.stand_in import FORWARD, StandIn, call_slot, warn_once

__all__ = ["RecomputePolicy", "Recomputing", "is_recomputed", "recomputes_by_itself"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePolicy:
    """Which activations are computed again in the backward pass.

    If some blocks recompute, they are always the first ones. The peak is at the beginning of the backward pass or where a block runs
    again. With the first blocks, the backward pass has freed the activations of all other blocks before one runs again. With the
    last blocks, the first to run again adds to everything the others hold. benchmarks/options/blocks/recomputed_blocks.py compares both, and an
    even spread.

    Attributes:
        blocks: Number of blocks, counted from the input, or `"all"`.
        keep_attention: Whether outputs of attention kernels (flash, memory-efficient, cuDNN) are saved, so that only the rest
            of a block runs twice.
        kept: For compiled blocks, the share of their activations that their graphs keep: 0 to less than 1. Torch's partitioner then chooses
            the cheapest operations to run again. None runs whole blocks again.
        last: Number of blocks, counted from the output, whose graphs keep the share `kept_last` in place of `kept`. The backward pass frees
            their activations first.
        kept_last: The larger share, up to 1; None if all blocks keep the same share.
        of: Number of all blocks, for messages; None if unknown.

    Raises:
        ValueError: If `blocks` is neither a count nor `"all"`, `kept` is no such share of all blocks, or `kept_last` no larger share of some.
    """

    blocks: int | Literal["all"]
    keep_attention: bool = False
    kept: float | None = None
    last: int = 0
    kept_last: float | None = None
    of: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        counts = isinstance(self.blocks, int) and not isinstance(self.blocks, bool) and self.blocks >= 0
        if not counts and self.blocks != "all":
            raise ValueError(f'blocks={self.blocks!r}: give how many blocks are recomputed, 0 or more, or "all".')
        if self.kept is not None and not (0 <= self.kept < 1 and self.blocks == "all" and not self.keep_attention):
            raise ValueError(
                f'kept={self.kept!r}: give a share from 0 to less than 1, with blocks="all" and no keep_attention.'
            )
        is_larger = self.kept is not None and self.kept_last is not None and self.kept < self.kept_last <= 1
        if (self.last, self.kept_last) != (0, None) and not (self.last > 0 and is_larger):
            raise ValueError(
                f"last={self.last!r}, kept_last={self.kept_last!r}: give a number of blocks, and a share above kept={self.kept!r} up to 1."
            )

    @property
    def everything(self) -> bool:
        """Whether all of every block is recomputed."""
        return self.blocks == "all" and not self.keep_attention and self.kept is None

    def shares(self, count: int) -> list[float | None]:
        """Return the share of its activations that each of `count` compiled blocks keeps.

        None stands for the fastest graph.
        """
        larger = None if self.kept_last == 1 else self.kept_last
        last = min(self.last, count)
        return [self.kept] * (count - last) + [larger] * last

    def choose(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the blocks that recompute, out of `blocks` in the order in which they run."""
        return list(blocks if self.blocks == "all" else blocks[: self.blocks])

    def __str__(self) -> str:
        """Return a short description.

        For example `"none"`, `"6 of 12 blocks"`, `"all blocks, attention kept"` or `"all blocks, 30 % kept, 50 % in the last 4"`.
        """
        if self.blocks == 0:
            return "none"
        if self.kept is not None:
            larger = "" if self.kept_last is None else f", {100 * self.kept_last:.3g} % in the last {self.last}"
            return f"all blocks, {100 * self.kept:.3g} % kept{larger}"
        known = "" if self.of is None or self.blocks == "all" else f" of {self.of}"
        plural = "" if self.blocks == 1 and self.of is None else "s"
        return f"{self.blocks}{known} block{plural}{', attention kept' if self.keep_attention else ''}"


class Recomputing:
    """Let blocks recompute their activations in training until `remove`.

    The `forward` of each block object is replaced. Its class, place, parameters, hooks and state-dict keys stay. A copy made with
    `copy.deepcopy`, `pickle` or `torch.save` does not recompute. Hooks of a block run once. Hooks of its submodules run in the second
    run too. The second run reads attributes, containers and buffers as the first did, and what it writes there is undone.

    A block that was compiled by itself (`block.compile()`, or `torch.compile(block)` in its place) stays compiled: the compiled call is
    replaced, so that both runs use the same graph. The hooks of such a block belong to the graph and run twice.

    Hugging Face's models pass an empty cache of keys and values in training if `use_cache=True`. A block then runs without it, as
    under their own gradient checkpointing, since the second run would fill it again. A block with a filled cache runs without
    recomputation, and a warning says so once.

    Use it as a context manager, or call `remove`.

    Args:
        blocks: The blocks; none may be inside another.
        keep_attention: Whether outputs of attention kernels are saved, so that these do not run again. A warning appears once
            if a block's first call runs no such kernel: plain products, as on MPS, or a mask or dropout on a CPU.
        left_out: Classes of blocks that do not recompute; the caller may add to it at any time.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], *, keep_attention: bool = False, left_out: Collection[type] = ()
    ) -> None:
        said: set[str] = set()
        self._stand_ins = [
            _StandIn(block, keep_attention=keep_attention, said=said, left_out=left_out) for block in blocks
        ]
        for stand_in in self._stand_ins:
            stand_in.install()

    def remove(self) -> None:
        """Restore the blocks' `forward`; a second call does nothing."""
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
    """Return whether `module` recomputes in training, by `Recomputing` or Hugging Face's switch."""
    return recomputes_by_itself(module) or any(
        isinstance(vars(module).get(slot), _StandIn) for slot in (FORWARD, COMPILED_CALL)
    )


def recomputes_by_itself(module: nn.Module) -> bool:
    """Return whether `module` recomputes in training by Hugging Face's switch."""
    return vars(module).get("gradient_checkpointing") is True and module.training


class _StandIn(StandIn):
    """Replacement of one block's `forward` or compiled call."""

    def __init__(self, block: nn.Module, *, keep_attention: bool, said: set[str], left_out: Collection[type]) -> None:
        super().__init__(block, call_slot(block))
        self._keep_attention, self._is_compiled, self._said = keep_attention, is_compiled(block), said
        self._left_out, self._calls = left_out, Calls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.module
        wanted = self.is_on and block.training and torch.is_grad_enabled()
        if not wanted or type(block) in self._left_out or getattr(block, "gradient_checkpointing", False) is True:
            return self.function(*args, **kwargs)
        if not torch.compiler.is_compiling() and in_a_transform():
            self._say(
                "is called inside a transform of torch.func, where torch cannot checkpoint: it is not recomputed."
            )
            return self.function(*args, **kwargs)
        args, kwargs = tuple(map(_unless_empty, args)), {name: _unless_empty(value) for name, value in kwargs.items()}
        cache = next((value for value in (*args, *kwargs.values()) if _is_cache(value)), None)
        if cache is not None:
            self._say(
                f"is called in training with a {type(cache).__name__} that it may fill, which a second run would fill twice: it is not "
                "recomputed. Run the training step without a cache (use_cache=False)."
            )
            return self.function(*args, **kwargs)
        if self._is_compiled and not torch.compiler.is_compiling():
            mark_rows((*args, *kwargs.values()))  # both runs must choose the same graph
        if not self._keep_attention:
            return recompute_call(self.function, args, kwargs, owner=block, calls=self._calls)
        kept = SavedAttention()
        result = recompute_call(self.function, args, kwargs, owner=block, kept=kept, calls=self._calls)
        if not kept.count and not torch.compiler.is_compiling():
            self._say(
                "runs no attention kernel whose output could be kept (flash, memory-efficient, cuDNN): all of it is recomputed."
            )
        return result

    def _say(self, what: str) -> None:
        """Log the problem of this class of blocks, once per text."""
        warn_once(self._said, f"{type(self.module).__name__} {what}")


def _is_cache(value: Any) -> bool:
    """Return whether `value` is an object that a block fills with keys and values.

    A tuple of tensors is none, because a block cannot fill it.
    """
    return hasattr(value, "get_seq_length") or type(value).__name__.lower().endswith("cache")


def _unless_empty(value: Any) -> Any:
    """Return None for an empty cache, else `value`.

    A cache is empty if its `get_seq_length` is 0 (`transformers.Cache.get_seq_length`).
    """
    return None if hasattr(value, "get_seq_length") and int(value.get_seq_length()) == 0 else value
