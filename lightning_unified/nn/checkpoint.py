"""Activation checkpointing of one block: its second run computes what the first did.

`torch.utils.checkpoint` runs the block a second time in the backward pass. Some differences from the first run give gradients or
statistics that are silently wrong:

1. Random numbers. torch restores only its own generators, and those of the devices of positional arguments (never MPS: issue
   127676, open in torch 2.13).
2. Buffers that the block writes. BatchNorm counts every batch twice.
3. Attributes, containers and parameters that have changed since, and arguments that the block writes in place.

`second_run` restores these for the second run. Other differences it finds by comparing outputs, on a sample of the calls.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_unified.nn.attention.saved import SavedAttention, graph_contexts
from lightning_unified.nn.autograd_limits import in_a_transform
from lightning_unified.nn.second_run.buffers import Buffers
from lightning_unified.nn.second_run.generators import Noise, RandomState
from lightning_unified.nn.second_run.runs import BothRuns, Calls
from lightning_unified.nn.second_run.state import BlockState

__all__ = ["RandomState", "recompute", "recompute_call"]


def recompute(block: Callable[..., Any], *args: Any, random_state: RandomState | None = None, **kwargs: Any) -> Any:
    """Return `block(*args, **kwargs)` and save only its inputs.

    The backward pass runs the block again. Gradients, buffers and the state of the random generators afterwards equal
    those of `block(*args, **kwargs)` bit for bit. Without gradients, and inside transforms of `torch.func`, the block is
    called directly.

    Args:
        block: A module, or any callable that depends on its arguments and on random generators only.
        *args: Its arguments.
        random_state: A generator to restore besides torch's and Python's own. Default: `torch.mps` if an argument is on MPS,
            else none.
        **kwargs: Its keyword arguments.

    Returns:
        The block's result.

    Raises:
        RecomputationError: In the backward pass, if the second run fails or gives another output.
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
    calls: Calls | None = None,
) -> Any:
    """Return `function(*args, **kwargs)` as `recompute` does.

    The function may read and write the attributes and buffers of `owner`.

    Args:
        function: The function to call.
        args: Its arguments.
        kwargs: Its keyword arguments.
        owner: The module whose state the second run must read as the first did; None for a function that has none.
        random_state: As for `recompute`.
        kept: Store for attention outputs, so that the second run skips these kernels; None saves none. A graph of
            `torch.compile` saves them by its own means.
        calls: The calls so far; None for those of `owner`, or of the function's code.

    Returns:
        The function's result.

    Raises:
        RecomputationError: In the backward pass, if the second run fails or gives another output, or if the function writes an argument in
            place that its first call did not write.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    values = (*args, *kwargs.values())
    if random_state is None and any(
        isinstance(leaf, Tensor) and leaf.device.type == "mps" for leaf in tree_leaves(values)
    ):
        random_state = torch.mps
    called = _by_position(function, len(args), tuple(kwargs))
    if torch.compiler.is_compiling() and random_state is None and not _may_write_buffers(owner):
        # a compiled graph restores its random state itself, and takes no `context_fn` but torch's selective one
        contexts = {} if kept is None else {"context_fn": graph_contexts()}
        return checkpoint(called, *values, use_reentrant=False, **contexts)
    return _eager(function, called, values, owner=owner, random_state=random_state, kept=kept, calls=calls)


@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]  # a graph accepts no context from here; torch.utils.checkpoint does the same
def _eager(
    function: Callable[..., Any],
    called: Callable[..., Any],
    values: Sequence[Any],
    *,
    owner: nn.Module | None,
    random_state: RandomState | None,
    kept: SavedAttention | None,
    calls: Calls | None,
) -> Any:
    if in_a_transform():
        return called(*values)
    state = BlockState(owner, values)
    lenders: list[Callable[[], AbstractContextManager[Any]]] = [state.lent, Noise(random_state, state.generators).lent]
    if owner is not None and owner.training and state.has_buffers:
        lenders.append(Buffers(owner).lent)
    if kept is not None:
        lenders.append(kept.again)
    runs = BothRuns(
        called, values, block=function if owner is None else owner, calls=calls or _calls_of(function, owner)
    )
    first, again = contextlib.nullcontext() if kept is None else kept.first(), _Again(*lenders)
    return checkpoint(
        runs,
        *runs.saved,
        use_reentrant=False,
        context_fn=lambda: (first, again),
        early_stop=not runs.is_compared,
        # the state of a generator cannot be read in a recording; no block that draws is recorded
        preserve_rng_state=not _is_recorded(),
    )


def _is_recorded() -> bool:
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()  # pyright: ignore[reportAttributeAccessIssue]


def _may_write_buffers(owner: nn.Module | None) -> bool:
    return owner is not None and owner.training and next(owner.buffers(), None) is not None


_CALLS: "WeakKeyDictionary[Any, Calls]" = WeakKeyDictionary()  # of modules, and of the code of functions


def _calls_of(function: Callable[..., Any], owner: nn.Module | None) -> Calls:
    key = owner if owner is not None else getattr(function, "__code__", type(function))
    return _CALLS.setdefault(key, Calls())


def _by_position(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `function` with keyword arguments made positional.

    Torch looks for devices in positional arguments only.
    """
    if not names:
        return function

    def called(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return called


class _Again(AbstractContextManager[None]):
    """Context of the second run; `retain_graph=True` enters it more than once."""

    def __init__(self, *lenders: Callable[[], AbstractContextManager[Any]]) -> None:
        self._lenders = lenders
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for lender in self._lenders:
                stack.enter_context(lender())
            self._stack = stack.pop_all()

    def __exit__(self, *details: object) -> None:
        self._stack.close()
