"""torch's fake mode, which is asked once for each operation on each kind of arguments, and is then done without."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from typing_extensions import override

__all__ = ["CachedFakeMode"]

aten = torch.ops.aten
_UNSAFE_VIEW = aten._unsafe_view.default  # shares its argument's storage, though its schema does not say so
_SAME = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SHAPING = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_ENTRIES = 50_000  # judgement: of the memory of one world; a step of a large network has a few thousand

Recipe = Callable[[Any], Any]


class _UnknownError(Exception):
    """Arguments of which nothing is remembered."""


class CachedFakeMode(FakeTensorMode):
    """Makes the tensors that torch's own mode makes, in a fraction of the time.

    That mode takes a tenth of a millisecond for each operation even where its own cache answers. Here an operation is looked up by what
    decides its results: its arguments' shapes, strides, dtypes and devices, and every number. Its results are then made as the mode made
    them the first time: new tensors of the same layout, the argument that was written, or nothing. Views are asked of torch itself
    without the mode's care for what does not occur in them. Whatever else there is goes to the mode: tensors that are constants, have
    no plain storage or are complex, results whose shapes depend on values, or that share a storage in a way that is not declared.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._recipes: dict[Any, Recipe | None] = {}
        self._told: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a dry run, and the check at each operation takes as long as the rest

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) and self._is_plain(args[0]):
            return self._viewed(func, args, kwargs)
        key: list[Any] = [func]
        try:
            self._describe(args, key)
            if kwargs:
                key += kwargs
                self._describe(kwargs.values(), key)
        except _UnknownError:
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = (torch.get_default_dtype(), *key)
        recipe = self._recipes.get(known)
        if recipe is not None:
            return recipe(args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if known not in self._recipes and len(self._recipes) < _ENTRIES:
            self._recipes[known] = self._recipe(func, args, kwargs, result, key)
        return result

    def _is_plain(self, value: Any) -> bool:
        """Return whether it is a fake of this world that is no constant, and no conjugate, which would be a view unawares."""
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.layout is torch.strided
            and not value.dtype.is_complex
        )

    def _describe(self, values: Any, key: list[Any]) -> None:
        """Append to `key` what of `values` decides an operation's results.

        Raises:
            _UnknownError: If there is something in it that is not followed.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_plain(value):
                    raise _UnknownError
                key += (value.shape, value.stride(), value.dtype, value.fake_device)
            elif value is None:
                key.append(None)
            elif kind in _SAME:
                key += (kind, value)
            elif kind in (list, tuple):
                key += (kind, len(value))
                self._describe(value, key)
            else:
                raise _UnknownError

    def _viewed(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        device = args[0].fake_device
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        told = self._told.get(device)
        if told is None:
            first = FakeTensor(self, result if isinstance(result, Tensor) else result[0], device)
            told = self._told[device] = dict(vars(first))
        if isinstance(result, Tensor):
            return _fake(result, device, told)
        return [_fake(one, device, told) for one in result]

    def _recipe(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, key: list[Any]) -> Recipe | None:
        """Return what makes such results from such arguments; None where nothing but the mode can."""
        if not isinstance(func, torch._ops.OpOverload) or any(tag in func.tags for tag in _SHAPING):
            return None
        if not func._schema.is_mutable:
            return self._new(args, kwargs, result)
        after: list[Any] = [func]
        self._describe(args, after)
        if kwargs or after != key:
            return None  # the operation changed the shape of what it wrote, or wrote what has a name
        if result is None:
            return lambda _: None
        at = next((at for at, value in enumerate(args) if value is result), None)
        return None if at is None else (lambda given: given[at])

    def _new(self, args: Any, kwargs: Mapping[str, Any], result: Any) -> Recipe | None:
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        storages = {one.untyped_storage()._cdata for one in _fakes_in((*args, *kwargs.values()))}
        makers: list[Callable[[], Tensor | None]] = []
        for one in results:
            maker = (lambda: None) if one is None else self._maker(one, storages)
            if maker is None:
                return None
            makers.append(maker)
        if not several:
            single = makers[0]
            return lambda _: single()
        kind = list if isinstance(result, list) else tuple
        return lambda _: kind([make() for make in makers])

    def _maker(self, one: Any, storages: set[int]) -> Callable[[], Tensor] | None:
        """Return what makes a tensor like `one`, if that is new, dense and plain; its storage is added to `storages`."""
        if type(one) is not FakeTensor or one.layout is not torch.strided or one.dtype.is_complex or one.requires_grad:
            return None
        storage = one.untyped_storage()
        shape, stride, dtype, device = tuple(one.shape), one.stride(), one.dtype, one.fake_device
        if one.constant is not None or storage._cdata in storages or one.storage_offset() or one.is_inference():
            return None
        if torch.empty_strided(shape, stride, dtype=dtype, device=_META).untyped_storage().nbytes() != storage.nbytes():
            return None
        storages.add(storage._cdata)
        told = dict(vars(one))

        def make() -> Tensor:
            return _fake(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device, told)

        return make


@cache
def _is_view(func: Any) -> bool:
    """Return whether all that `func` does is to look at its argument otherwise."""
    if func is _UNSAFE_VIEW:
        return True
    is_view = isinstance(func, torch._ops.OpOverload) and func.is_view
    return is_view and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _fake(meta: Tensor, device: torch.device, told: Mapping[str, Any]) -> Tensor:
    """Return a fake over `meta`, as `FakeTensor` makes one: what it notes of a new tensor is in `told`."""
    fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)  # pyright: ignore[reportCallIssue]
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(told)  # pyright: ignore[reportAttributeAccessIssue]
    return fake


_META = torch.device("meta")


def _fakes_in(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _fakes_in(value)
