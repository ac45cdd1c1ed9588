"""Fake copies: deep copies of modules with a fake tensor in place of each tensor.

A step reads the same from the copy as from the module, except values.
"""

import copy
import threading
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.planner.fake.known_values import set_value
from lightning_unified.step.undo import Drawn

__all__ = ["UncopyableError", "fake_copy", "fake_tensor"]

Copied = TypeVar("Copied")

_KNOWN_WHOLE, _KNOWN_REAL = (
    1 << 16,
    1,
)  # entries: larger tensors lose their values; counters, masks and single numbers keep them


class UncopyableError(ValueError):
    """A tensor that cannot become a fake tensor."""


def fake_copy(
    thing: Copied,
    *,
    device: torch.device,
    cast: Mapping[int, torch.dtype] | None = None,
    shared: Iterable[Any] = (),
) -> Copied:
    """Return a deep copy of `thing` with a fake tensor in place of each tensor in it.

    Call it inside `fake_world`.

    Tied weights and views of one storage stay tied. Tensors on the meta device become fake tensors of `device` like all others. NumPy arrays
    are shared, because a step does not write them. Objects that cannot be copied are shared too.

    Args:
        thing: A module, or an object that holds modules or tensors.
        device: The device that the fake tensors report.
        cast: The dtype of a fake tensor where it differs, by `id` of the real tensor.
        shared: Objects to share instead of copying them.

    Raises:
        UncopyableError: If a tensor cannot become a fake tensor.
    """
    shared = list(shared)
    kept: dict[int, Any] = {id(one): one for one in shared}
    with _copying(_Fakes(device, cast or {})):
        try:
            return copy.deepcopy(thing, dict(kept))
        except (TypeError, AttributeError, NotImplementedError, RuntimeError):
            kept.update(_uncopyable(thing, kept))
            return copy.deepcopy(thing, dict(kept))


def fake_tensor(tensor: Tensor, *, device: torch.device) -> Tensor:
    """Return a fake tensor like `tensor`, on `device`; call it inside `fake_world`."""
    return _Fakes(device, {})(tensor, {})


class _Fakes:
    """Makes one fake tensor for each tensor, and one storage for each storage."""

    def __init__(self, device: torch.device, cast: Mapping[int, torch.dtype]) -> None:
        self._device, self._cast = device, cast
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if isinstance(tensor, FakeTensor):
            raise UncopyableError("a tensor in it is a fake one already; give the module as it trains")
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise UncopyableError("a lazy layer in it has no shape yet; run one batch through it first")
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            raise UncopyableError(f"a {type(tensor).__name__} ({tensor.layout}) in it has no plain storage")
        dtype = self._cast.get(id(tensor), tensor.dtype)
        fake = self._made(tensor, dtype)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_(True)
        for name, value in vars(tensor).items():
            if name not in vars(fake):
                setattr(fake, name, value)
        memo[id(tensor)] = fake
        return fake

    def _made(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        limit = _KNOWN_REAL if tensor.is_floating_point() or tensor.is_complex() else _KNOWN_WHOLE
        with torch.no_grad():
            fake = self._over_storage(tensor, dtype)
        if not tensor.is_meta and tensor.numel() <= limit:
            with no_dispatch():
                value = tensor.detach().to("cpu", dtype, copy=True)
            set_value(fake, value)
        return fake

    def _over_storage(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        storage = tensor.untyped_storage()
        entries = storage.nbytes() // max(tensor.element_size(), 1)
        key = (storage._cdata, dtype)
        base = self._storages.get(key)
        if base is None:
            if entries == tensor.numel() and tensor.storage_offset() == 0:
                base = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)
            else:
                base = torch.empty(entries, dtype=dtype, device=self._device)
            self._storages[key] = base
            if base.shape == tensor.shape and base.stride() == tensor.stride():
                return base
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


@contextmanager
def _copying(fakes: _Fakes) -> Iterator[None]:
    """Let `copy.deepcopy` make fake tensors, and share objects that need no copy.

    Objects that cannot be copied are shared too.
    """
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    added = [kind for kind in _SHARED if kind not in dispatch]

    def fake_of(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        return fakes(tensor, memo)

    with ExitStack() as stack:
        for kind in (Tensor, nn.Parameter, UninitializedParameter):
            stack.enter_context(replaced(kind, "__deepcopy__", fake_of))
        stack.enter_context(replaced(nn.Module, "__deepcopy__", _module_copy))
        stack.enter_context(replaced(RecursiveScriptModule, "__deepcopy__", _refuse_script))
        for kind in added:
            dispatch[kind] = lambda thing, _memo: thing
            stack.callback(dispatch.pop, kind)
        if OrderedDict not in dispatch:
            dispatch[OrderedDict] = _ordered_copy
            stack.callback(dispatch.pop, OrderedDict)
        yield


def _refuse_script(module: RecursiveScriptModule, _memo: dict[int, Any]) -> NoReturn:
    """Refuse a TorchScript module, which holds its tensors outside of Python."""
    raise UncopyableError(f"{module.original_name} in it is a TorchScript module, which holds real tensors")


def _module_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a module, equal to that of `copy.deepcopy` in a third of the time.

    Each module has a dozen empty containers and many plain values, which need no further look.
    """
    kind: Any = type(module)
    if not _has_plain_state(kind):
        return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]
    memo[id(module)] = made = kind.__new__(kind)
    found: dict[str, Any] = {}
    for name, value in module.__getstate__().items():
        if id(value) in memo:
            found[name] = memo[id(value)]
        elif type(value) in _IMMUTABLE:
            found[name] = value
        elif type(value) in _CONTAINERS and not value and not getattr(value, "__dict__", None):
            found[name] = memo[id(value)] = type(value)()
        else:
            found[name] = copy.deepcopy(value, memo)
    made.__setstate__(found)
    return made


@cache
def _has_plain_state(kind: type[nn.Module]) -> bool:
    """Return whether the state of such modules is their attributes, and they are made without arguments."""
    usual = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    asks = any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
    is_usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in usual)
    return is_usual and not asks and not issubclass(kind, (dict, list))


def _ordered_copy(given: OrderedDict[Any, Any], memo: dict[int, Any]) -> OrderedDict[Any, Any]:
    """Return a deep copy of an `OrderedDict`.

    Each module has many empty ones, for which `copy.deepcopy` takes ten times as long.
    """
    memo[id(given)] = made = OrderedDict()
    for name, value in given.items():
        made[copy.deepcopy(name, memo)] = copy.deepcopy(value, memo)
    if vars(given):
        vars(made).update(copy.deepcopy(vars(given), memo))
    return made


_IMMUTABLE = (type(None), bool, int, float, str, torch.dtype)
_CONTAINERS = (dict, OrderedDict, set)
_SHARED: tuple[type, ...] = (
    np.ndarray,
    torch.Generator,  # fake operations draw no random numbers
    types.ModuleType,
    types.GeneratorType,
    torch.jit.ScriptFunction,
    Drawn,
    type(threading.Lock()),
    type(threading.RLock()),
)


def _uncopyable(thing: Any, kept: Mapping[int, Any]) -> dict[int, Any]:
    """Return the attributes of `thing` and its submodules that cannot be copied, by their `id`."""
    owners = list(thing.modules()) if isinstance(thing, nn.Module) else [thing]
    found: dict[int, Any] = {}
    own = {"_parameters", "_buffers", "_modules"}
    for owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if name in own or isinstance(value, nn.Module):
                continue
            try:
                copy.deepcopy(value, {**kept, **{id(one): one for one in owners}})
            except (TypeError, AttributeError, NotImplementedError, RuntimeError):
                found[id(value)] = value
    return found
