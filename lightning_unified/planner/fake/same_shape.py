"""Operations on tensors of one shape: what one call showed holds for every other shape.

An element-wise operation on contiguous tensors of one shape returns a contiguous tensor of that shape. Its dtype depends on the dtypes of its
arguments and on its numbers, not on the shape. So after one call torch's own inference, which takes a quarter of a millisecond, is no longer
needed for calls at other sizes. A product of two matrices is as simple.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Size, Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["SameShape"]

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.clone.default, aten.empty_like.default, aten.zeros_like.default)
_PRODUCT, _MATRIX = aten.mm.default, 2
_PLAIN = (int, float, bool, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))

Layout = tuple[Size, torch.dtype, torch.device]


class SameShape:
    """Remembers the dtypes of results, by operation and kinds of arguments."""

    def __init__(self) -> None:
        self._dtypes: dict[Any, tuple[torch.dtype, torch.device]] = {}

    def layout(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Layout | None:
        """Return the shape, dtype and device of the contiguous result of a call; None if no call has shown them."""
        found = _kind(func, args, kwargs)
        if found is None:
            return None
        kind, shape = found
        known = self._dtypes.get(kind)
        return None if known is None else (shape, *known)

    def note(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Learn from the result of a call, a new tensor."""
        found = _kind(func, args, kwargs)
        if found is not None and type(result) is FakeTensor:
            kind, shape = found
            if result.shape == shape and _is_contiguous(result):
                self._dtypes[kind] = result.dtype, result.fake_device


def _kind(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Size] | None:
    """Return the key of the calls that differ in their shape only, and the shape of the result.

    None for other calls.
    """
    if func is _PRODUCT:
        left, right = args
        if left.dim() != _MATRIX or right.dim() != _MATRIX or left.shape[1] != right.shape[0]:
            return None
        return (func, left.dtype, right.dtype, left.fake_device), Size((left.shape[0], right.shape[1]))
    if not _keeps_shape(func):
        return None
    shape: Size | None = None
    kind: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    for value in (*args, *kwargs.values()):
        if type(value) is FakeTensor:
            if shape is None:
                shape = value.shape
            if value.shape != shape or not _is_contiguous(value):
                return None
            kind += (value.dtype, value.fake_device)
        elif isinstance(value, _PLAIN):
            kind += (type(value), value)
        else:
            return None
    return None if not shape else (tuple(kind), shape)


@cache
def _keeps_shape(func: Any) -> bool:
    if func in _COPIES:
        return True
    return isinstance(func, torch._ops.OpOverload) and torch.Tag.pointwise in func.tags and not func._schema.is_mutable


def _is_contiguous(tensor: Tensor) -> bool:
    """Return whether the strides are those of a new tensor of this shape.

    Empty tensors count as not contiguous.
    """
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return expected > 0
