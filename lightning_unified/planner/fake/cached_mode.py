"""Cached fake-tensor mode: infers each operation's output shapes once per signature.

A call's signature describes its arguments: their shapes, strides, dtypes, devices and all numbers.

torch's own fake mode takes a tenth of a millisecond for each operation, even if its cache answers. A dry run executes thousands. This
mode looks up a recipe by the operation and the signature. The recipe makes the results as torch's mode made them the first time: new
tensors of the same layout, the argument that was written, or None.

It deviates from torch's mode in three ways:

1. Views, element-wise operations, reductions and operations on lists are computed by torch's kernels on meta tensors, without the fake
   mode's checks for cases that cannot occur in them.
2. A tensor made from numbers is no constant of the mode, because `Answers` knows its values.
3. Arguments without a plain signature always go to torch's mode: constants, sparse or complex tensors, and unknown Python types. So do
   operations whose output shapes depend on values, or whose results share storage without declaring it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_unified.planner.fake.known_values import WITHOUT_TENSORS, are_wrapped, tensors_among
from lightning_unified.planner.fake.own_kernels import OWN_KERNELS, run_on_zeros
from lightning_unified.planner.fake.same_shape import SameShape

__all__ = ["CachedFakeMode"]

aten = torch.ops.aten
_UNSAFE_VIEW = aten._unsafe_view.default  # shares its argument's storage, although its schema does not declare it
_LIFT = aten.lift_fresh.default  # torch calls it for each tensor that it makes from numbers
_BY_KERNEL = (
    aten._to_copy.default,
    aten.cat.default,
    aten.mean.dim,
    aten.slice_backward.default,
    aten.sum.default,
    aten.sum.dim_IntList,
)  # besides element-wise operations and those on lists
_ON_LISTS = ("aten::_foreach_", "aten::_fused_adam")  # of an optimizer's tensors; torch's own mode hashes each tensor
_SAME = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SHAPING = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_ENTRIES = 50_000  # judgement: recipes of one world; a step of a large network needs a few thousand

Recipe = Callable[["CachedFakeMode", Any], Any]

_recipes: dict[Any, Recipe | None] = {}  # of all worlds: a recipe gives layouts, which are the same in each
_same_shape = SameShape()


class _UnknownError(Exception):
    """Arguments that have no signature."""


class CachedFakeMode(FakeTensorMode):
    """Makes the same tensors as torch's own mode, in about a fifth of the time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # a dry run compiles nothing, and torch's check takes as long at each operation as all else

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._of_higher_order(func, types, args, kwargs)
        if are_wrapped(types):
            return NotImplemented
        if _is_view(func) and self._is_plain(args[0]):
            return self._by_kernel(func, args, kwargs, args[0].fake_device)
        if func is _LIFT and _is_simple(args[0]):
            return self.fake(torch.empty(args[0].shape, dtype=args[0].dtype, device=_META), args[0].device)
        key = self._key(func, args, kwargs)
        if key is None:
            return self._inferred(func, types, args, kwargs)
        known = (torch.get_default_dtype(), *key)
        recipe = self._known_recipe(known, func, args, kwargs)
        if recipe is not None:
            return recipe(self, args)
        result = self._made(func, types, args, kwargs)
        if known not in _recipes and len(_recipes) < _ENTRIES:
            recipe = _recipes[known] = self._recipe(func, args, kwargs, result, key)
            if recipe is not None:
                _same_shape.note(func, args, kwargs, result)
        return result

    def _of_higher_order(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator of functions, by torch's rule for its own mode.

        torch looks for rules by the mode's class, and finds none for a subclass.
        """
        rule = func.python_key_table.get(FakeTensorMode)
        if rule is None or "redirect_to_mode" in rule.__qualname__:  # torch 2.13: the mode has the rule
            return super().__torch_dispatch__(func, types, args, kwargs)
        return rule(self, *args, **kwargs)

    def _known_recipe(self, known: Any, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Recipe | None:
        """Return the recipe for a signature, perhaps from a call with another shape."""
        recipe = _recipes.get(known)
        if recipe is None and known not in _recipes:
            layout = _same_shape.layout(func, args, kwargs)
            if layout is not None and len(_recipes) < _ENTRIES:
                recipe = _recipes[known] = _contiguous(*layout)
        return recipe

    def _made(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call that has a signature, by its kernel alone where that suffices."""
        if _needs_only_its_kernel(func) and "device" not in kwargs:
            devices = {one.fake_device for one in tensors_among((*args, *kwargs.values()))}  # pyright: ignore[reportAttributeAccessIssue]
            if len(devices) == 1:
                with suppress(NotImplementedError):  # an operator without such a kernel
                    return self._by_kernel(func, args, kwargs, devices.pop())
        return self._inferred(func, types, args, kwargs)

    def _inferred(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of torch's mode; `own_kernels` infers shapes that torch refuses."""
        own = OWN_KERNELS.get(func)
        if own is not None:
            return own(*args, **kwargs)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except UnsupportedOperatorException as error:
            try:
                shapes = run_on_zeros(func, args, kwargs)
            except (RuntimeError, NotImplementedError):
                raise error from None
            return tree_map_only(Tensor, lambda meta: FakeTensor(self, meta, torch.device("cpu")), shapes)

    def known(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call whose recipe is known, or of a view; else `NotImplemented`.

        The caller disables torch's dispatch to Python, so that the tensors are made without it.
        """
        if _is_view(func) and self._is_plain(args[0]):
            return self._by_kernel(func, args, kwargs, args[0].fake_device)
        key = self._key(func, args, kwargs)
        if key is None:
            return NotImplemented
        recipe = self._known_recipe((torch.get_default_dtype(), *key), func, args, kwargs)
        return NotImplemented if recipe is None else recipe(self, args)

    def _key(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the signature of a call; None if an argument has none."""
        key: list[Any] = [func]
        try:
            self._describe(args, key)
            if kwargs:
                key += kwargs
                self._describe(kwargs.values(), key)
        except _UnknownError:
            return None
        return key

    def _is_plain(self, value: Any) -> bool:
        """Return whether `value` is a strided fake tensor of this mode, not constant or complex.

        Complex tensors are left out, because conjugates are hidden views.
        """
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.layout is torch.strided
            and not value.dtype.is_complex
        )

    def _describe(self, values: Any, key: list[Any]) -> None:
        """Append the signature of `values` to `key`.

        Raises:
            _UnknownError: If a value has no signature.
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

    def _by_kernel(self, func: Any, args: Any, kwargs: Mapping[str, Any], device: torch.device) -> Any:
        """Return the result of torch's kernel on meta tensors."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return self.fake(result, device)
        return result and [self.fake(one, device) for one in result]

    def fake(self, meta: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor over `meta`, as `FakeTensor` makes one."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = dict(vars(FakeTensor(self, meta, device)))
        fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)  # pyright: ignore[reportCallIssue]
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)  # pyright: ignore[reportAttributeAccessIssue]
        return fake

    def _recipe(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, key: list[Any]) -> Recipe | None:
        """Return the recipe that makes such results from such arguments.

        The result is None if only torch's mode can.
        """
        if not isinstance(func, torch._ops.OpOverload) or any(tag in func.tags for tag in _SHAPING):
            return None
        if func in WITHOUT_TENSORS:
            return lambda _, __: result
        if not func._schema.is_mutable:
            return self._new(args, kwargs, result)
        if self._key(func, args, kwargs) != key:
            return None  # the operation changed the shape of a tensor that it wrote
        if result is None:
            return lambda _, __: None
        if kwargs:
            return None  # it may have written a keyword argument and returned it
        at = next((at for at, value in enumerate(args) if value is result), None)
        return None if at is None else (lambda _, given: given[at])

    def _new(self, args: Any, kwargs: Mapping[str, Any], result: Any) -> Recipe | None:
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        storages = {one.untyped_storage()._cdata for one in tensors_among((*args, *kwargs.values()))}
        makers: list[Callable[[CachedFakeMode], Tensor | int | None]] = []
        for one in results:
            is_number = one is None or (several and type(one) is int)  # such as the longest row of an attention
            maker = (lambda _, number=one: number) if is_number else self._maker(one, storages)
            if maker is None:
                return None
            makers.append(maker)
        if not several:
            single = makers[0]
            return lambda mode, _: single(mode)
        kind = list if isinstance(result, list) else tuple
        return lambda mode, _: kind([make(mode) for make in makers])

    def _maker(self, one: Any, storages: set[int]) -> "Callable[[CachedFakeMode], Tensor] | None":
        """Return a function that makes a tensor like `one` in a mode, if that is new, dense and plain.

        Add its storage to `storages`.
        """
        if type(one) is not FakeTensor or one.layout is not torch.strided or one.dtype.is_complex or one.requires_grad:
            return None
        storage = one.untyped_storage()
        shape, stride, dtype, device = tuple(one.shape), one.stride(), one.dtype, one.fake_device
        if one.constant is not None or storage._cdata in storages or one.storage_offset() or one.is_inference():
            return None
        if torch.empty_strided(shape, stride, dtype=dtype, device=_META).untyped_storage().nbytes() != storage.nbytes():
            return None
        storages.add(storage._cdata)

        def make(mode: CachedFakeMode) -> Tensor:
            return mode.fake(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)

        return make


def _contiguous(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Recipe:
    """Return the recipe of a new contiguous tensor."""

    def make(mode: CachedFakeMode, _: Any) -> Tensor:
        return mode.fake(torch.empty(shape, dtype=dtype, device=_META), device)

    return make


def _is_simple(made: Any) -> bool:
    """Return whether `made` is a contiguous real tensor."""
    return type(made) is Tensor and made.layout is torch.strided and made.is_contiguous() and not made.is_complex()


@cache
def _needs_only_its_kernel(func: Any) -> bool:
    """Return whether torch's mode infers the results of `func` by its kernel for meta tensors alone."""
    if not isinstance(func, torch._ops.OpOverload) or func in OWN_KERNELS:
        return False
    if func._schema.name.startswith(_ON_LISTS):
        return True
    return func in _BY_KERNEL or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


@cache
def _is_view(func: Any) -> bool:
    """Return whether `func` only returns a view of its argument."""
    if func is _UNSAFE_VIEW:
        return True
    is_view = isinstance(func, torch._ops.OpOverload) and func.is_view
    return is_view and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


_META = torch.device("meta")
