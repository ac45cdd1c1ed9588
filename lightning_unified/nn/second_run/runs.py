"""Both runs of one call of a block, and arguments that the block writes in place."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointError

from lightning_unified.errors import RecomputationError
from lightning_unified.nn.compiled import ORIGINAL, compiled_parts
from lightning_unified.nn.second_run.outputs import Observed
from lightning_unified.nn.second_run.writes import CopiesBeforeWrites, copy_of

__all__ = ["BothRuns", "Calls", "named_errors", "recomputed_calls", "runs_again", "saves_elsewhere"]

_WAYS_OUT = (
    "It depends on more than its arguments, its attributes and random generators, e.g. on a global or on a context that ends before the "
    "backward pass. Pass such values to it as arguments, or set recompute=False."
)
_DIFFERS = (
    "{name} computed other values when activation checkpointing ran it again in the backward pass ({by}), so its gradients would be "
    "wrong. "
)
_FAILED = (
    "{name} failed when activation checkpointing ran it again in the backward pass ({why}), unlike its first run. "
)
_WRITES = (
    "{name} writes its argument {position} in place, unseen by torch's dispatch or unlike its first call, so that activation checkpointing cannot run this call "
    "again in the backward pass. Let it write a copy, or set recompute=False."
)
_WRITTEN = (
    "argument {position} of {name} was written in place after the call, so that activation checkpointing cannot run this call again in the "
    "backward pass. Write a copy, or set recompute=False."
)
# Errors that other state causes. Errors of memory and of devices are RuntimeError, MemoryError or OSError, and pass as they are.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    CheckpointError,
    LookupError,
    NameError,
    StopIteration,  # which would end the fit without a word
    TypeError,
    ValueError,
)

_RAISES = 2  # torch.cuda.get_sync_debug_mode where a wait for the device is an error

_own_hooks: ContextVar[Any] = ContextVar("own_hooks", default=None)
_count = [0]  # of first runs so far
_again = [0]  # of second runs that are under way
_LATEST: list[Any] = [None]  # the class of the block that ran last for the second time


@dataclass(eq=False)
class Calls:
    """What is known of a block's calls.

    Attributes:
        count: The number of calls so far.
        written: Positions of the arguments that the block writes in place; None before its first call.
    """

    count: int = 0
    written: set[int] | None = None


class BothRuns:
    """Calls a function with its own arguments first, then with those that were saved.

    An argument that the function writes in place is saved as a copy from before the first run. The first call of a block finds those
    arguments, and copies each before it is written.

    Both runs are compared in calls 1 to 4, 8, 16, 32, …, unless a dispatch mode is active, e.g. in a dry run, or the host must not wait for
    the device: while CUDA graphs are recorded or rehearsed, or if the user set `torch.cuda.set_sync_debug_mode("error")`.

    Args:
        function: The function.
        values: Its arguments.
        block: The block, a module or a function.
        calls: The block's calls so far; this one is counted.

    Attributes:
        saved: The arguments that the checkpoint saves.
        is_compared: Whether the second run is compared with the first, for which it must run to its end.
    """

    def __init__(self, function: Callable[..., Any], values: Sequence[Any], *, block: Any, calls: Calls) -> None:
        calls.count += 1
        is_due = calls.count <= 4 or calls.count & (calls.count - 1) == 0
        self.is_compared = is_due and _can_compare()
        # dispatch modes see the operations of eager code only
        self._looks_inside = (self.is_compared or calls.written is None) and not _is_compiled(block)
        if calls.written is None and not self._looks_inside:
            calls.written = set()
        self._function, self._calls = function, calls
        self._versions: dict[int, int] = {}
        self._kind: Any = type(block) if isinstance(block, nn.Module) else block
        self._values: Sequence[Any] | None = values
        self._observed: Observed | None = None
        # arguments that torch does not save, because the first call may write them
        self._held: dict[int, Tensor] = {}
        self.saved = list(values)
        for position, value in enumerate(values):
            if calls.written is None and _is_writable(value):
                self._held[position] = value
                # torch reads the devices of saved arguments; a dry run must not count another operation
                self.saved[position] = None if isinstance(value, FakeTensor) else _placeholder(value)
            elif calls.written is not None and position in calls.written and _is_writable(value):
                self.saved[position] = copy_of(value)

    def __call__(self, *saved: Any) -> Any:
        if self._values is None:
            return self._second(saved)
        values, self._values = self._values, None
        _count[0] += 1
        token = _own_hooks.set(_saving_hooks())
        try:
            return self._first(values)
        finally:
            _own_hooks.reset(token)

    def _first(self, values: Sequence[Any]) -> Any:
        versions = [(place, one, one._version) for place, one in enumerate(values) if _is_writable(one)]
        writes = CopiesBeforeWrites(self._held)
        observed = Observed(looks_inside=self._looks_inside) if self.is_compared else None
        with writes if self._held else contextlib.nullcontext():
            result = self._function(*values) if observed is None else observed.run(self._function, values)
        self._observed = observed
        self._learn({place for place, one, version in versions if one._version != version}, writes.copies)
        return result

    def _learn(self, written: set[int], copies: Mapping[int, Tensor]) -> None:
        known = self._calls.written
        self._calls.written = written | (known or set())
        self._held.update({place: copies[place] for place in written & copies.keys()})
        if new := written - copies.keys() - (known or set()):
            raise RecomputationError(_WRITES.format(name=_name(self._kind), position=min(new)), kind=self._kind)
        self._versions = {place: one._version for place, one in self._held.items()}

    def _second(self, saved: Sequence[Any]) -> Any:
        name, values = _name(self._kind), list(saved)
        _LATEST[0] = self._kind
        for position, value in self._held.items():
            if value._version != self._versions.get(position, value._version):
                raise RecomputationError(_WRITTEN.format(name=name, position=position), kind=self._kind)
            values[position] = value
        for position in self._calls.written or ():
            if position < len(values) and isinstance(values[position], Tensor):
                values[position] = values[position].clone()  # no leaf of autograd, which could not be written
        again = None if self._observed is None else Observed(looks_inside=self._looks_inside)
        _again[0] += 1
        try:
            result = self._function(*values) if again is None else again.run(self._function, values)
        except _ERRORS as error:
            why = f"{type(error).__name__}: {error}"
            raise RecomputationError(_FAILED.format(name=name, why=why) + _WAYS_OUT, kind=self._kind) from error
        finally:
            _again[0] -= 1
        if self._observed is not None and again is not None and (by := self._observed.difference(again)):
            raise RecomputationError(_DIFFERS.format(name=name, by=by) + _WAYS_OUT, kind=self._kind)
        return result


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Raise `RecomputationError` where torch's checkpoint finds that a second run differs.

    Raises:
        RecomputationError: If a block saved other tensors in its second run.
    """
    _LATEST[0] = None
    try:
        yield
    except CheckpointError as error:
        kind = _LATEST[0]
        if kind is None:  # of a checkpoint that is not ours
            raise
        raise RecomputationError(
            _DIFFERS.format(name=_name(kind), by="it saved other tensors") + _WAYS_OUT, kind=kind
        ) from error


def recomputed_calls() -> int:
    """Return how many calls so far run a second time in the backward pass."""
    return _count[0]


def runs_again() -> bool:
    """Return whether a block is in its second run, whose results the user has seen already."""
    return _again[0] > 0


def saves_elsewhere() -> bool:
    """Return whether hooks change the tensors saved for the backward pass.

    Such hooks recompute (torch.utils.checkpoint), move or pack them. Those of `recompute` itself do not count.
    """
    hooks = _saving_hooks()
    return hooks is not None and hooks != _own_hooks.get()


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]


def _is_compiled(block: Any) -> bool:
    return bool(compiled_parts(block)) if isinstance(block, nn.Module) else hasattr(block, ORIGINAL)


def _name(kind: Any) -> str:
    return "a block" if kind is None else getattr(kind, "__qualname__", repr(kind))


def _can_compare() -> bool:
    may_wait = not torch.cuda.is_initialized() or not (
        torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == _RAISES
    )
    return torch._C._len_torch_dispatch_stack() == 0 and may_wait


def _placeholder(like: Tensor) -> Tensor:
    """Return what torch saves in place of `like`: a tensor without entries.

    A checkpoint of the user's around the block compares shapes and types with those that a later call saves. There it has one entry in the
    shape of `like`. Elsewhere it has none, because Metal may give one entry a block of a megabyte.
    """
    if saves_elsewhere():
        return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
    return torch.empty(0, device=like.device)


def _is_writable(value: Any) -> bool:
    """Return whether a block may write `value` in place, and its version tells of it."""
    return (
        isinstance(value, Tensor)
        and not (value.requires_grad and value.is_leaf)
        and value.layout is torch.strided
        and not value.is_inference()
        and not isinstance(value, nn.Parameter)
        and 0 not in value.stride()
    )
