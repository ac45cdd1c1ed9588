"""The fake world: a block in which all new tensors are fake and training steps run."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.planner.fake.cached_mode import CachedFakeMode
from lightning_unified.planner.fake.known_values import Answers, array_of, tensors_among, value_of
from lightning_unified.planner.fake.packing import packed_by_value
from lightning_unified.planner.fake.value_shapes import READ_SCALAR

__all__ = ["World", "fake_world"]

_ARRAY_ENTRIES = 1 << 24  # judgement: the largest array of zeros that is made up for `.numpy()`


class World:
    """A fake-tensor mode with the answers to reads of values.

    Tensors of one world cannot be used in another.

    Args:
        other: Whether a made-up value that can decide a shape differs from the default one.

    Attributes:
        mode: Makes tensors fake.
        answers: Answers reads of values.
        place: Returns the name of the module that runs, noted with each read.
        live: Returns the number of live storages.
    """

    def __init__(self, *, other: bool = False) -> None:
        self.place: Callable[[], str] = str
        self.live: Callable[[], int] = int
        self.mode: FakeTensorMode = CachedFakeMode()
        self._recipes = getattr(self.mode, "known", None)  # torch's own mode has none
        self.answers = Answers(self._here, self._living, other=other)

    def known(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that needs no inference of torch's.

        It reads a known number, or its recipe is known and no known value takes part.

        It equals the result of the dispatch through both modes, which takes several times as long. Other calls give
        `NotImplemented`.
        """
        if func is READ_SCALAR:
            value = self.answers.known(args[0])
            if value is None:
                return NotImplemented
            with torch._C._DisableTorchDispatch():  # an optimizer reads the step count of each parameter
                return func(value)
        if self._recipes is None or self.answers.concerns(func, args, kwargs):
            return NotImplemented
        with torch._C._DisableTorchDispatch():
            return self._recipes(func, args, kwargs)

    def _here(self) -> str:
        return self.place()

    def _living(self) -> int:
        return self.live()


@contextmanager
def fake_world(world: World | None = None) -> Iterator[tuple[FakeTensorMode, Answers]]:
    """Make every tensor created inside the block a fake tensor, and answer reads of values.

    It closes four gaps of torch's mode:

    1. `copy.deepcopy` of a fake tensor corrupts the heap, and torchmetrics makes such copies in `self.log`.
    2. Formatting a fake tensor needs its value.
    3. Conversion to NumPy needs it too.
    4. `torch.tensor` and `torch.as_tensor` read the memory of tensors in lists, such as norms of gradients.

    Args:
        world: A world that was entered before, to continue in it; None for a new one.

    Yields:
        The mode that makes tensors fake, and the mode that answers reads.
    """
    world = World() if world is None else world
    mode, answers = world.mode, world.answers
    methods: Mapping[str, Any] = {
        "__deepcopy__": _deep_copy,
        "__format__": _format,
        "numpy": lambda fake, **_: _as_array(fake, answers),
        "__array__": lambda fake, *_, **__: _as_array(fake, answers),
    }
    with ExitStack() as stack:
        for name, replacement in methods.items():
            stack.enter_context(replaced(FakeTensor, name, replacement))
        stack.enter_context(replaced(nn.Module, "_apply", _apply))
        transformers = sys.modules.get("transformers.utils.import_utils")
        if hasattr(transformers, "is_fake_tensor"):
            # it takes fake tensors for a sign of a compiler, and then makes masks that training does not make
            stack.enter_context(replaced(transformers, "is_fake_tensor", lambda _: False))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(replaced(torch, name, partial(_of_numbers, getattr(torch, name))))
        # torch logs a stack trace for each operation that fails; the `DryRunError` names the operation already
        stack.enter_context(replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(packed_by_value(answers))
        stack.enter_context(mode)
        stack.enter_context(answers)
        yield mode, answers


_APPLY = nn.Module._apply


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Move or convert a module as torch does with real weights.

    Torch swaps fake weights, and fails if they have references.
    """
    own = [one for one in module._parameters.values() if one is not None]
    if not all(isinstance(one, FakeTensor) for one in own):
        return _APPLY(module, fn, recurse)
    if recurse:
        for child in module.children():
            child._apply(fn)
    with torch.no_grad():
        for parameter in own:
            _put(parameter, fn(parameter))
            if parameter.grad is not None:
                _put(parameter.grad, fn(parameter.grad))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return module


def _put(fake: Any, applied: Any) -> None:
    if applied is not fake:
        fake.data = applied
        fake.fake_device = applied.fake_device


def _deep_copy(fake: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy as `Tensor.__deepcopy__` makes one.

    An operation makes it, because a fake tensor has no bytes to copy.
    """
    if id(fake) in memo:
        return memo[id(fake)]
    with torch.no_grad():
        result = fake.detach().clone()
    if isinstance(fake, nn.Parameter):
        result = nn.Parameter(result, requires_grad=fake.requires_grad)
    else:
        result.requires_grad_(fake.requires_grad)
    memo[id(fake)] = result
    if fake.grad is not None:
        result.grad = copy.deepcopy(fake.grad, memo)
    return result


def _of_numbers(made: Callable[..., Tensor], data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return a tensor made of a list, with the numbers of the fake tensors in it."""
    within = tensors_among(data) if isinstance(data, (list, tuple)) else ()
    fakes = [one for one in within if isinstance(one, FakeTensor)]
    if fakes and not args and kwargs.get("dtype") is None:
        kwargs["dtype"] = reduce(torch.promote_types, (one.dtype for one in fakes))
    return made(_numbers(data) if fakes else data, *args, **kwargs)


def _numbers(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_numbers(one) for one in data]
    return data.tolist() if isinstance(data, FakeTensor) else data


def _format(fake: Tensor, specification: str) -> str:
    return format(fake.item(), specification) if fake.dim() == 0 else object.__format__(fake, "")


def _as_array(fake: FakeTensor, answers: Answers) -> np.ndarray[Any, Any]:
    if value_of(fake) is not None:
        known = array_of(fake)
        assert known is not None
        return known
    if fake.numel() > _ARRAY_ENTRIES:
        raise RuntimeError(f"an array of {fake.numel():,} entries is read from a tensor that has no values")
    answers.note("numpy", "zeros", shapes=True)
    return np.zeros(tuple(fake.shape), dtype=_DTYPES.get(fake.dtype, np.float32))


_DTYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
