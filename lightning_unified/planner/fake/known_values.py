"""Known values of fake tensors: answer a step's reads, and make up unknown values.

A fake tensor has no storage, yet steps read values: `loss.item()`, `lengths.max()`, `x[mask]`. Small integer tensors, such as labels, masks
and counters, therefore carry a real tensor beside them. Each operation on such tensors is executed on the real values too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from traceback import walk_tb
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_unified.cost_model.trace.trace import Read
from lightning_unified.planner.fake.awaited import AWAITED, Awaits, Place, operation_after, reading_places
from lightning_unified.planner.fake.value_shapes import READS, is_mask, made_up_answer, shaped_by_known

__all__ = ["WITHOUT_TENSORS", "Answers", "are_wrapped", "set_value", "tensors_among", "value_of"]

_VALUE = "_lightning_unified_value"
_ENTRIES = 1 << 18  # judgement: larger results are not computed, so that the trace stays fast
_ENDLESS = 20_000  # judgement: a loop with as many reads waits for a value that never comes

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
WITHOUT_TENSORS = (aten.promote_types.default,)
"""Operations whose result follows from their arguments, none of which is a tensor."""

_VALIDATED: set[tuple[Place, ...]] = set()
"""Places that raise where a value is False, such as `if not valid.all()`.

Each has its callers up to the one that raises.
"""

_FOUND_INF = aten._amp_foreach_non_finite_check_and_unscale_.default


def set_value(fake: Tensor, value: Tensor) -> Tensor:
    """Attach `value` to `fake`, a tensor on the host that no other code writes; return `fake`."""
    setattr(fake, _VALUE, value)
    return fake


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the known value of `tensor`; None if it is unknown."""
    if isinstance(tensor, FakeTensor):
        return tensor.__dict__.get(_VALUE)
    if are_wrapped((type(tensor),)):
        return None
    return None if tensor.is_meta or tensor.numel() > _ENTRIES else tensor


def are_wrapped(types: Iterable[type]) -> bool:
    """Return whether an operation has arguments that wrap other tensors, such as DTensors.

    A dispatch mode returns `NotImplemented` for them: the wrapper then calls the operation on the tensors inside, which the mode sees.
    """
    return any(map(_wraps, types))


@cache
def _wraps(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__")


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)


class Answers(TorchDispatchMode):
    """Carries known values along with fake tensors, and answers reads of unknown values.

    Known values are the batch's integers, small buffers, and tensors made from constants (`zeros`, `arange`). So a step reads counters,
    lengths, masks and the optimizers' step counts as they are. A read of an unknown value returns 1, False, or the largest possible number
    of entries (the smallest for unique entries), and is noted in `reads`. Gradients count as finite. Code that raises after it read False
    reads True there from then on, as do loops that wait for True.

    This mode lies above the mode that makes fake tensors, and below the recorder.

    Args:
        place: Returns the name of the module that runs.
        live: Returns the number of live storages.
        other: Whether made-up values that can decide a shape differ from the default: 3 instead of 1, half as many entries.

    Attributes:
        reads: The reads of unknown values, in order.
        silent: Whether reads are not noted.
    """

    def __init__(self, place: Callable[[], str], live: Callable[[], int], *, other: bool = False) -> None:
        super().__init__()
        self._other = other
        self.reads: list[Read] = []
        self.silent = False
        self._place = place
        self._count = 0
        self._denied: tuple[Place, ...] = ()
        self._awaits = Awaits(live)
        self._lost: dict[int, torch.UntypedStorage] = {}

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # a dry run compiles nothing, and torch's check takes as long at each operation as all else

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if are_wrapped(types):
            return NotImplemented
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        tensors = list(tensors_among((*args, *kwargs.values())))
        values = [self.known(tensor) for tensor in tensors]
        known = all(value is not None for value in values)
        if func in READS or (func is aten.index.Tensor and any(map(is_mask, args[1]))):
            return (self._answered if known else self._shaped)(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, tuple) and _has_duplicates(result) and not func._schema.is_mutable:
            # from the second call on, torch's cache returns two tensors here; call again, so that the first call agrees
            result = func(*args, **kwargs)
        if known and _is_small(result) and not _has_no_value(func):
            self._carry(func, args, kwargs, result)
        elif func._schema.is_mutable and any(value is not None for value in values):
            self._forget_written(func, args, kwargs)
        return result

    def concerns(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call may read, carry or overwrite known values."""
        kind = _kind_of(func)
        if kind is _READS:
            return True
        decides = kind is _WRITES  # one known value decides there, elsewhere one unknown value
        for tensor in tensors_among((*args, *kwargs.values()) if kwargs else args):
            if (self.known(tensor) is not None) is decides:
                return decides
        return kind is _COMPUTES

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return the value of `tensor`.

        None if it is unknown or was overwritten by an unknown value.
        """
        value = value_of(tensor)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def _carry(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Execute an operation on the known values too."""
        try:
            real = self._with_values(func, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            self._forget_written(func, args, kwargs)
            return
        for fake, value in zip(tensors_among((result,)), tensors_among((real,)), strict=False):
            if isinstance(fake, FakeTensor):
                set_value(fake, value)

    @staticmethod
    def _with_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        with no_dispatch(), torch.no_grad():
            return func(*_values_in(args), **_values_in(kwargs))

    def _forget_written(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if func is _FOUND_INF:
            args = (args[0],)  # the flag keeps its value: gradients are finite
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._lose(given)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._lose(kwargs[argument.name])

    def _lose(self, written: Any) -> None:
        for tensor in tensors_among((written,)):
            value = value_of(tensor)
            if value is not None:
                storage = value.untyped_storage()
                self._lost[storage._cdata] = storage

    def _answered(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Answer a read from known values; a tensor result becomes a fake tensor of its shape."""
        real = self._with_values(func, args, kwargs)
        if not isinstance(real, (Tensor, tuple, list)):
            return real
        values = tensors_among((real,))
        fakes = [set_value(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), one) for one in values]
        return fakes[0] if isinstance(real, Tensor) else tuple(fakes)

    def _shaped(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return results shaped by the known arguments, else by made-up values."""
        shaped = shaped_by_known(func, args, self.known)
        return self._made_up(func, args, kwargs) if shaped is None else shaped

    def _made_up(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._count += 1
        if self._count > _ENDLESS:
            raise RuntimeError(f"the step reads values again and again ({_ENDLESS:,} times), and none is known")
        length = (args[2] if len(args) > 2 else kwargs.get("minlength", 0)) if func is aten.bincount.default else 0
        if length:
            return args[0].new_empty((length,))  # with a given number of bins, no value lies beyond them
        answer, words, shapes = made_up_answer(func, args, kwargs, other=self._other)
        if answer is False:
            self._denied = reading_places()
            answer = any(self._denied[: depth + 1] in _VALIDATED for depth in range(len(self._denied)))
            words = str(answer)
            if not answer and self._awaits.answer(self._denied[0] if self._denied else None):
                answer, words, shapes = True, AWAITED, True  # what the loop keeps from then on is unknown
        self.note(str(func), words, shapes=shapes)
        return answer

    def learn_from(self, error: Exception) -> bool:
        """Return whether other answers may avoid `error`; they are given from then on.

        The code that last read False raised it, or a caller that branches on its result; a loop waits for True; or code that
        read True as such a loop raised it.
        """
        if self._awaits.learn_from(error):
            return True
        if not self._denied:
            return False
        raising = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
        cause = self._denied[:1] if self._denied[0][0] in raising else _up_to_caller(self._denied, raising[-1])
        if not cause or cause in _VALIDATED:
            return False
        _VALIDATED.add(cause)
        return True

    def note(self, op: str, answer: str, *, shapes: bool) -> None:
        """Note a read that was answered with a made-up value."""
        if not self.silent:
            self.reads.append(Read(op=op, place=self._place(), answer=answer, shapes=shapes))


def _up_to_caller(read: tuple[Place, ...], raising: CodeType) -> tuple[Place, ...]:
    """Return a read's places up to the caller that raises by its result; none without one.

    Such a caller is `if not is_valid(x): raise`.
    """
    for depth, place in enumerate(read[1:], 2):
        taken_by = operation_after(place)
        if place[0] is raising and taken_by.startswith("POP_JUMP"):
            return read[:depth]
        if taken_by != "RETURN_VALUE":
            break
    return ()


def _is_small(result: Any) -> bool:
    return sum(tensor.numel() for tensor in tensors_among((result,))) <= _ENTRIES


def _has_duplicates(results: tuple[Any, ...]) -> bool:
    """Return whether an operation returns one tensor twice."""
    tensors = [id(one) for one in results if isinstance(one, Tensor)]
    return len(set(tensors)) < len(tensors)


_READS, _WRITES, _MAKES, _COMPUTES = "reads", "writes", "makes", "computes"


@cache
def _kind_of(func: Any) -> str:
    """Return what an operation does with values.

    Operations of `_MAKES` make a tensor without values from any arguments, or have to do with no tensor.
    """
    if func in READS or func is aten.index.Tensor:
        return _READS
    if func._schema.is_mutable:
        return _WRITES
    return _MAKES if _has_no_value(func) or func in WITHOUT_TENSORS else _COMPUTES


def _has_no_value(func: Any) -> bool:
    """Return whether the result of `func` is random or uninitialized memory."""
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name


def _values_in(given: Any) -> Any:
    if isinstance(given, FakeTensor):
        return given.__dict__[_VALUE]
    if isinstance(given, (list, tuple)):
        return type(given)(_values_in(value) for value in given)
    if isinstance(given, dict):
        return {name: _values_in(value) for name, value in given.items()}
    return given


def array_of(fake: FakeTensor) -> np.ndarray[Any, Any] | None:
    """Return the known value of `fake` as an array; None if it is unknown."""
    value = value_of(fake)
    with no_dispatch():
        return None if value is None else value.numpy()
