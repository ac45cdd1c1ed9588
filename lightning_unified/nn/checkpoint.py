"""Activation checkpointing of one block: equal random numbers and buffers in both runs.

`torch.utils.checkpoint` runs the block a second time in the backward pass. Two differences from the first run give gradients or
statistics that are silently wrong:

1. Random numbers. torch restores only its own generators, and those of the devices of positional arguments (never MPS: issue
   127676, open in torch 2.13).
2. Buffers that the block writes. BatchNorm counts every batch twice.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_unified.nn.attention.saved import SavedAttention, graph_contexts

__all__ = ["RandomState", "recompute", "recompute_call"]


class RandomState(Protocol):
    """A random generator with a state to restore.

    Examples are `torch.mps` and a wrapper of `torch.Generator`.
    """

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor, /) -> None: ...


def recompute(block: Callable[..., Any], *args: Any, random_state: RandomState | None = None, **kwargs: Any) -> Any:
    """Return `block(*args, **kwargs)` and save only its inputs.

    The backward pass runs the block again. Gradients, buffers and the state of the random generators afterwards equal
    those of `block(*args, **kwargs)` bit for bit. Without gradients, the block is called directly.

    Args:
        block: A module, or any callable that depends on its arguments only.
        *args: Its arguments.
        random_state: A generator to restore besides torch's and Python's own. Default: `torch.mps` if an argument is on MPS,
            else none.
        **kwargs: Its keyword arguments.

    Returns:
        The block's result.
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
    """Return `function(*args, **kwargs)` as `recompute` does.

    The function may read and write the buffers of `owner`.

    Args:
        function: The function to call.
        args: Its arguments.
        kwargs: Its keyword arguments.
        owner: The module whose buffers the second run must read as the first did; None for a function that writes none.
        random_state: As for `recompute`.
        kept: Store for attention outputs, so that the second run skips these kernels; None saves none. A graph of
            `torch.compile` saves them by its own means.

    Returns:
        The function's result.
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
        # a compiled graph restores its random state itself, and takes no `context_fn` but torch's selective one
        contexts = {} if kept is None else {"context_fn": graph_contexts()}
        return checkpoint(called, *values, use_reentrant=False, **contexts)
    return _eager(called, values, owner=owner if writes else None, random_state=random_state, kept=kept)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # a graph accepts no context from here; torch.utils.checkpoint does the same
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
    """Return `function` with keyword arguments made positional.

    Torch looks for devices in positional arguments only.
    """
    if not names:
        return function

    def called(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return called


class _Noise:
    """States before the first run of the generators that torch does not restore."""

    def __init__(self, random_state: RandomState | None) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [(random.getstate, random.setstate)]
        if random_state is not None:
            self._generators.append((random_state.get_rng_state, random_state.set_rng_state))
        self._before = [get() for get, _ in self._generators]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the states of the first run inside the context."""
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
    """Values of a block's buffers before its first run, used again in the second."""

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
        """Swap the block's buffers for copies of the old values inside the context.

        Copying the values back would count as a write and invalidate tensors that autograd saved.
        """
        # of TorchScript modules, `_buffers` has no method `get`
        current = [module._buffers[name] if name in module._buffers else None for module, name, _ in self._slots]  # noqa: SIM401
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
    """Return the tensors without repeats, so that a buffer shared by two modules stays one."""
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Again(AbstractContextManager[None]):
    """Context of the second run; `retain_graph=True` enters it more than once."""

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
