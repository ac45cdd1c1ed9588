"""Recompute a block in the backward pass instead of keeping its activations, with the same noise and the same buffers.

`torch.utils.checkpoint` runs the block a second time. Two things may then differ from the first run: random numbers, for torch puts
back its own generators only, and those of the devices of positional arguments (never MPS: issue 127676, open in torch 2.13); and the
buffers a block writes (BatchNorm counts every batch twice). Both give gradients or statistics that are silently wrong.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_unified.nn.saved_attention import SavedAttention, graph_contexts

__all__ = ["RandomState", "recompute", "recompute_call"]


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
        random_state: The generator to put back besides torch's and Python's own; by default `torch.mps` when an
            argument lies on MPS, else none.
        **kwargs: Its keyword arguments.

    Returns:
        What the block returns.
    """
    owner = block if isinstance(block, nn.Module) else None
    return recompute_call(block, args, kwargs, owner=owner, random_state=random_state)


def recompute_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    owner: nn.Module | None = None,
    random_state: RandomState | None = None,
    kept: SavedAttention | None = None,
) -> Any:
    """Return `function(*args, **kwargs)` as `recompute` does, for a function that reads and writes the buffers of `owner`.

    Args:
        function: What is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        owner: The module whose buffers the second run must find as the first did; None for a function that writes none.
        random_state: As for `recompute`.
        kept: Where the outputs of attention kernels are kept, so that the second run does without these kernels; None keeps none.
            A graph of `torch.compile` keeps them in its own way.

    Returns:
        What the function returns.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    values = (*args, *kwargs.values())
    if random_state is None and any(
        isinstance(leaf, Tensor) and leaf.device.type == "mps" for leaf in tree_leaves(values)
    ):
        random_state = torch.mps
    writes = owner is not None and owner.training and next(owner.buffers(), None) is not None
    called = _by_position(function, len(args), tuple(kwargs))
    if torch.compiler.is_compiling() and random_state is None and not writes:
        # the noise of a compiled graph is put back by the graph
        contexts = noop_context_fn if kept is None else graph_contexts()
        return checkpoint(called, *values, use_reentrant=False, context_fn=contexts)
    return _eager(called, values, owner=owner if writes else None, random_state=random_state, kept=kept)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # a graph takes no context of ours; as torch.utils.checkpoint does
def _eager(
    function: Callable[..., Any],
    values: Sequence[Any],
    *,
    owner: nn.Module | None,
    random_state: RandomState | None,
    kept: SavedAttention | None,
) -> Any:
    again = _Again(_Noise(random_state), _Buffers(owner) if owner is not None else None, kept)
    first = contextlib.nullcontext() if kept is None else kept.first()
    return checkpoint(function, *values, use_reentrant=False, context_fn=lambda: (first, again))


def _by_position(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `function` with its keyword arguments behind its `count` others: torch looks for devices in positional ones only."""
    if not names:
        return function

    def called(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return called


class _Noise:
    """The generators that torch does not put back, as they were before the first run."""

    def __init__(self, random_state: RandomState | None) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [(random.getstate, random.setstate)]
        if random_state is not None:
            self._generators.append((random_state.get_rng_state, random_state.set_rng_state))
        self._before = [get() for get, _ in self._generators]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let the block draw the numbers that it drew first."""
        current = [get() for get, _ in self._generators]
        self._set(self._before)
        try:
            yield
        finally:
            self._set(current)

    def _set(self, states: list[Any]) -> None:
        for (_, put), state in zip(self._generators, states, strict=True):
            put(state)


class _Buffers:
    """The buffers a block had before its first run, to be lent to the second."""

    def __init__(self, block: nn.Module) -> None:
        self._slots = [
            (module, name, value)
            for module in block.modules()
            for name, value in module._buffers.items()
            if value is not None
        ]
        self._before = [value.detach().clone() for value in _each_once(value for _, _, value in self._slots)]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Exchange the block's buffers for fresh copies of the old values; a swap, because a copy back would count as a
        write and invalidate what autograd saved.
        """
        current = [module._buffers.get(name) for module, name, _ in self._slots]
        originals = _each_once(value for _, _, value in self._slots)
        copies = {id(one): before.clone() for one, before in zip(originals, self._before, strict=True)}
        for module, name, value in self._slots:
            module._buffers[name] = copies[id(value)]
        try:
            yield
        finally:
            for (module, name, _), value in zip(self._slots, current, strict=True):
                module._buffers[name] = value


def _each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without repeats: a buffer that two modules share stays one."""
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Again(AbstractContextManager[None]):
    """The surroundings of the second run; may be entered more than once, as `retain_graph=True` does."""

    def __init__(self, noise: _Noise, buffers: _Buffers | None, kept: SavedAttention | None) -> None:
        self._noise, self._buffers, self._kept = noise, buffers, kept
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._noise.again())
            if self._buffers is not None:
                stack.enter_context(self._buffers.lent())
            if self._kept is not None:
                stack.enter_context(self._kept.again())
            self._stack = stack.pop_all()

    def __exit__(self, *details: object) -> None:
        self._stack.close()
