"""Effects of operations on lazy logits: record, select, compute in chunks, or read values."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from lightning_unified.nn.lazy_logits.loss import cross_entropy
from lightning_unified.nn.lazy_logits.nodes import writes_in_place
from lightning_unified.nn.lazy_logits.source import HERE, Source, Step
from lightning_unified.nn.lazy_logits.tensor import LazyLogits, View, lazy, lazy_among

__all__ = ["run"]

_T = torch.Tensor
_ELEMENTWISE: set[Any] = {
    torch.div, torch.true_divide, torch.mul, torch.multiply, torch.add, torch.sub, torch.neg, torch.tanh, torch.clamp, functional.tanh,
    _T.div, _T.true_divide, _T.mul, _T.multiply, _T.add, _T.sub, _T.neg, _T.tanh, _T.clamp, _T.clamp_min, _T.clamp_max,
    _T.__truediv__, _T.__mul__, _T.__rmul__, _T.__add__, _T.__radd__, _T.__sub__, _T.__neg__,
    _T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type_as,
}  # fmt: skip
_PLAIN = (Tensor, FakeTensor)
_INDICES = (int, slice, Tensor, type(None), type(Ellipsis))  # lists and arrays may index several dimensions
_ADDRESSES: set[Any] = {_T.data_ptr, _T.untyped_storage, _T.numpy, _T.__dlpack__, _T.__array__}  # need values that stay
_WRITES = {"__setitem__", "requires_grad_", "register_hook", "retain_grad", "backward", "__set__", "set_"}


def run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation with lazy logits among its arguments."""
    given = lazy_among(args, kwargs)
    views = [one.view_of_logits for one in given]
    if len(views) == 1 and views[0].source.real is None and views[0].source.is_current:
        found = _recorded(func, args, kwargs, given[0])
        if found is not NotImplemented:
            return found
    if _asks_for_gradient(func, args, kwargs):
        _refuse_after_loss(func, views)
    for view in views:
        if view.source.real is None and view.source.settled is None:
            view.source.call.say(_name(func))
    with_graph = torch.is_grad_enabled() or _writes(func, kwargs) or func in _ADDRESSES

    def read(value: Any) -> Any:
        if not isinstance(value, LazyLogits):
            return value
        view = value.view_of_logits
        return view.computed() if with_graph else view.passing()

    result = func(*tree_map(read, args), **tree_map(read, dict(kwargs)))
    return args[0] if args and writes_in_place(func) and isinstance(args[0], LazyLogits) else result


def _asks_for_gradient(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation asks for the gradient of lazy logits."""
    if func is torch.autograd.grad:
        return bool(lazy_among((args[1] if len(args) > 1 else kwargs.get("inputs"),), {}))
    return func in {_T.register_hook, _T.retain_grad}


def _refuse_after_loss(func: Any, views: list[View]) -> None:
    """Raise if the logits' loss was computed in chunks before: no gradient would reach them."""
    scored = next((view.source.call for view in views if view.source.call.losses), None)
    if scored is not None:
        raise RuntimeError(
            f"{_name(func)} asks for the gradient of the logits of {type(scored.head).__name__}, and their loss was computed in chunks before, "
            "without them. Ask before the loss is computed, or set memory.loss_chunk=false."
        )


def _recorded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: LazyLogits) -> Any:
    """Return the result of an operation that needs no values now, else `NotImplemented`."""
    view = logits.view_of_logits
    if func in _ELEMENTWISE:
        return _elementwise(func, args, kwargs, logits)
    if not args or args[0] is not logits:
        is_loss = func is functional.cross_entropy and kwargs.get("input") is logits
        return _loss(view, logits.dtype, (), {**kwargs, "input": None}) if is_loss else NotImplemented
    if func is functional.cross_entropy:
        return _loss(view, logits.dtype, args[1:], kwargs)
    if func in {torch.argmax, _T.argmax}:
        return _argmax(view, *args[1:], **kwargs)
    if func in {_T.contiguous}:
        is_copied = view.classes == len(view.shape) - 1 and not view.hidden.is_contiguous()
        return _part(logits, _T.contiguous, view.hidden.contiguous()) if is_copied else logits
    if func in {_T.detach, torch.detach}:
        return lazy(replace(view, path=(*view.path, _T.detach), is_tracked=False), logits.dtype)
    if func in {torch.transpose, _T.transpose, _T.swapaxes, _T.mT.__get__}:  # pyright: ignore[reportAttributeAccessIssue]
        return _transposed(logits, *(args[1:] or kwargs.values() or (-2, -1)))
    shown = _shown(func, args[1:], kwargs, view)
    return NotImplemented if shown is None else _part(logits, partial(_call, func, args[1:], kwargs), shown)


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Tensor) -> Tensor:
    return func(value, *args, **kwargs)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: LazyLogits) -> Any:
    """Record an element-wise operation with numbers, one-entry tensors or one entry per class."""
    view = logits.view_of_logits
    others = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one is not logits]
    if view.classes != len(view.shape) - 1 or sum(one is logits for one in args) != 1:
        return NotImplemented
    classes, dims = view.shape[-1], len(view.shape)
    if any(one.dim() > dims or one.numel() != (one.shape[-1] if one.dim() else 1) for one in others):
        return NotImplemented
    if any(one.numel() not in (1, classes) for one in others):
        return NotImplemented
    # one entry shows the dtype and device of the result
    with torch.no_grad():
        entry = view.hidden.new_empty((1,) * dims, dtype=logits.dtype)
        ones = {id(one): one.new_empty((1,) * one.dim()) for one in others}
        ones[id(logits)] = entry
        try:
            result = func(
                *[ones.get(id(one), one) for one in args],
                **{name: ones.get(id(one), one) for name, one in kwargs.items()},
            )
        except (RuntimeError, TypeError, ValueError):
            return NotImplemented
    if result is entry:
        return logits
    if (
        not isinstance(result, Tensor)
        or result.shape != entry.shape
        or result.device != entry.device
        or not result.is_floating_point()
    ):
        return NotImplemented
    flat = {id(one): one.reshape(-1) if one.dim() > 1 else one for one in others}
    flat[id(logits)] = HERE  # pyright: ignore[reportArgumentType]
    step = Step(
        func,
        tuple(flat.get(id(one), one) for one in args),
        {name: flat.get(id(one), one) for name, one in kwargs.items()},
    )
    source = Source(view.source.call, view.hidden, (*view.source.steps, step), view.shape)
    tracked = view.is_tracked and torch.is_grad_enabled()
    return lazy(View(source, view.hidden, view.shape, view.classes, (), tracked), result.dtype)


def _part(logits: LazyLogits, step: Callable[[Tensor], Tensor], hidden: Tensor) -> LazyLogits:
    """Return the part of the logits whose positions are those of `hidden`.

    Where hidden states are copied, logits would be: the part has a source of its own, so that writes into it stay.
    """
    view = logits.view_of_logits
    shape, tracked = (*hidden.shape[:-1], view.shape[-1]), view.is_tracked and torch.is_grad_enabled()
    source, path = view.source, (*view.path, step)
    if hidden.untyped_storage()._cdata != view.hidden.untyped_storage()._cdata:
        source, path = Source(source.call, hidden, source.steps, shape), ()
    return lazy(View(source, hidden, shape, len(shape) - 1, path, tracked), logits.dtype)


def _shown(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], view: View) -> Tensor | None:
    """Return the hidden states that a view of the logits shows; None if it changes the classes."""
    if view.classes != len(view.shape) - 1:
        return None
    hidden, classes = view.hidden, view.shape[-1]
    if func is _T.__getitem__:
        index = _positions(args[0], len(view.shape))
        return None if index is None else hidden[index]
    if func in {_T.view, _T.reshape, torch.reshape}:
        shape = _shape(args, kwargs, view.shape)
        if not shape or shape[-1] != classes:
            return None
        return hidden.reshape(*shape[:-1], hidden.shape[-1])
    if func in {_T.flatten, torch.flatten}:
        start, end = _bound(args, kwargs, start_dim=0, end_dim=-1)
        dims = len(view.shape)
        start, end = start % dims, end % dims
        return hidden.flatten(start, end) if end < dims - 1 else None
    if func in {_T.narrow, torch.narrow, _T.select, torch.select, _T.unsqueeze, torch.unsqueeze}:
        dim = args[0] if args else kwargs.get("dim")
        last = len(view.shape) - (func not in {_T.unsqueeze, torch.unsqueeze})
        if not isinstance(dim, int) or dim in (-1, last):
            return None
        return func(hidden, *args, **kwargs)
    return None


def _bound(args: tuple[Any, ...], kwargs: Mapping[str, Any], **defaults: Any) -> list[Any]:
    return list({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}.values())


def _shape(args: tuple[Any, ...], kwargs: Mapping[str, Any], now: tuple[int, ...]) -> list[int] | None:
    """Return the shape given to `view` or `reshape`, with -1 replaced; None for other arguments."""
    given: Any = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    given = given or kwargs.get("shape") or kwargs.get("size")
    if not given or not all(isinstance(length, (int, torch.SymInt)) for length in given):
        return None
    count = torch.Size(now).numel()
    known = torch.Size([length for length in given if length != -1]).numel()
    if not known or count % known:
        return None
    return [count // known if length == -1 else length for length in given]


def _positions(index: Any, dims: int) -> Any:
    """Return the index that selects the same positions from hidden states.

    None if the index selects among classes.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, (bool, LazyLogits)) or not isinstance(entry, _INDICES) for entry in entries):
        return None
    used = sum(_dims_of(entry) for entry in entries)
    if any(entry is Ellipsis for entry in entries):
        at = next(place for place, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = [slice(None)] * (dims - used)
        used = dims
    if used > dims:
        return None
    if used == dims:
        last = entries.pop()
        if not isinstance(last, slice) or last != slice(None):
            return None
    return tuple(entries)


def _dims_of(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _transposed(logits: LazyLogits, first: Any, second: Any) -> Any:
    """Move the classes before the positions, as `cross_entropy` expects them, or back."""
    view, dims = logits.view_of_logits, len(logits.view_of_logits.shape)
    if dims != 3 or {operator.index(first) % dims, operator.index(second) % dims} != {1, 2}:
        return NotImplemented
    shape, tracked = (view.shape[0], view.shape[2], view.shape[1]), view.is_tracked and torch.is_grad_enabled()
    path = (*view.path, lambda value: value.transpose(1, 2))
    return lazy(replace(view, shape=shape, classes=3 - view.classes, path=path, is_tracked=tracked), logits.dtype)


def _argmax(view: View, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the class with the greatest logit, in chunks."""
    if dim is None or dim % len(view.shape) != view.classes or view.classes != len(view.shape) - 1:
        return NotImplemented
    with torch.no_grad():
        rows = view.hidden.reshape(-1, view.hidden.shape[-1]).split(view.source.call.rows)
        found = [view.source.logits_of(chunk, (len(chunk), view.shape[-1])).argmax(-1) for chunk in rows]
        best = torch.cat(found).reshape(view.shape[:-1])
    return best.unsqueeze(-1) if keepdim else best


def _loss(view: View, dtype: torch.dtype, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("input", None)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        return NotImplemented
    target = given.pop("target", None)
    positions = (*view.shape[: view.classes], *view.shape[view.classes + 1 :])
    is_dense = len(view.shape) > 1 and view.classes == 1
    if not is_dense or type(target) not in _PLAIN or target.dtype != torch.long or target.shape != positions:
        return NotImplemented
    if target.device != view.hidden.device or given.get("reduction", "mean") not in ("none", "mean", "sum"):
        return NotImplemented
    weight = given.get("weight")
    if weight is not None and (weight.requires_grad or weight.shape != (view.shape[view.classes],)):
        return NotImplemented
    return cross_entropy(view, target, dtype=dtype, **given)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", None)  # of an attribute, such as Tensor.data
    return owner if name in ("__get__", "__set__") and owner else name


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation writes into its arguments, or depends on the graph."""
    return writes_in_place(func) or getattr(func, "__name__", "") in _WRITES or "out" in kwargs
