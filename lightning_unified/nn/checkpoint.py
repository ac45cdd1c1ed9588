"""Recompute a block in the backward pass instead of keeping its activations, with the same noise and the same buffers.

`torch.utils.checkpoint` runs the block a second time. Two things may then differ from the first run: the random numbers
of a device whose generator torch does not put back (MPS: issue 127676, open in torch 2.13), and the buffers a block
writes (BatchNorm counts every batch twice). Both give gradients or statistics that are silently wrong.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

__all__ = ["RandomState", "recompute"]


class RandomState(Protocol):
    """A random generator that can be put back: `torch.mps` is one, so is a thin wrapper of a `torch.Generator`."""

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor, /) -> None: ...


def recompute(block: Callable[..., Any], *args: Any, random_state: RandomState | None = None, **kwargs: Any) -> Any:
    """Return `block(*args, **kwargs)`, keeping only its inputs for the backward pass, which runs the block again.

    Gradients, buffers and the state of the random generators afterwards equal those of `block(*args, **kwargs)` bit for
    bit. Without gradients the block is simply called.

    Args:
        block: A module, or any callable whose random numbers and tensors come from its arguments.
        *args: Its arguments.
        random_state: The generator to put back besides those torch puts back itself; by default `torch.mps` when an
            argument lies on MPS, else none.
        **kwargs: Its keyword arguments.

    Returns:
        What the block returns.
    """
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    if random_state is None and any(
        isinstance(leaf, Tensor) and leaf.device.type == "mps" for leaf in tree_leaves(args)
    ):
        random_state = torch.mps
    buffers = (
        _Buffers(block)
        if isinstance(block, nn.Module) and block.training and next(block.buffers(), None) is not None
        else None
    )
    if random_state is None and buffers is None:
        # torch.compile accepts no context of ours, so none is given where none is due.
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
    return checkpoint(
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: _contexts(random_state, buffers),
        **kwargs,
    )


class _Buffers:
    """The buffers a block had before its first run, to be lent to the second."""

    def __init__(self, block: nn.Module) -> None:
        self._slots = [
            (module, name) for module in block.modules() for name, value in module._buffers.items() if value is not None
        ]
        self._before = [self._read(module, name).detach().clone() for module, name in self._slots]

    @staticmethod
    def _read(module: nn.Module, name: str) -> Tensor:
        value = module._buffers[name]
        if value is None:
            raise RuntimeError(
                f"buffer {name!r} vanished between the forward and the backward pass; keep it registered."
            )
        return value

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Exchange the block's buffers for fresh copies of the old values; a swap, because a copy back would count as a
        write and invalidate what autograd saved.
        """
        current = [self._read(module, name) for module, name in self._slots]
        for (module, name), value in zip(self._slots, self._before, strict=True):
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), value in zip(self._slots, current, strict=True):
                module._buffers[name] = value


def _contexts(
    random_state: RandomState | None, buffers: _Buffers | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    saved = random_state.get_rng_state() if random_state is not None else None
    return contextlib.nullcontext(), _Again(random_state, saved, buffers)


class _Again(contextlib.AbstractContextManager[None]):
    """The surroundings of the second run; may be entered more than once, as `retain_graph=True` does."""

    def __init__(self, random_state: RandomState | None, saved: Tensor | None, buffers: _Buffers | None) -> None:
        self._random_state, self._saved, self._buffers = random_state, saved, buffers
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        if self._random_state is not None and self._saved is not None:
            current = self._random_state.get_rng_state()
            self._random_state.set_rng_state(self._saved)
            stack.callback(self._random_state.set_rng_state, current)
        if self._buffers is not None:
            stack.enter_context(self._buffers.lent())
        self._stack = stack

    def __exit__(self, *details: object) -> None:
        self._stack.close()
