"""Counts of floating-point operations: torch's own formulas, and those that torch lacks.

Some of torch's formulas differ between releases; these are replaced too.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = ["flops_of"]


def flops_of(func: Any) -> Callable[..., int] | None:
    """Return the formula for `func`, called with its arguments and `out_val`.

    The result is None if there is none.
    """
    packet = getattr(func, "_overloadpacket", None)
    own = _FORMULAS.get(packet)
    return _by_shapes(flop_registry.get(packet)) if own is None else own


def _by_shapes(formula: Any) -> Callable[..., int] | None:
    """Return one of torch's formulas without torch's own search for shapes.

    The search takes as long as the rest of a matrix product.
    """
    inner = getattr(formula, "__wrapped__", None)
    if inner is None:
        return formula

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return inner(*map(_shape, args), out_shape=_shape(out_val), **named)

    return count


def _shape(value: Any) -> Any:
    """Return the shape of a tensor, and the shapes of tensors in lists."""
    if isinstance(value, Tensor):
        return value.shape
    return type(value)(map(_shape, value)) if type(value) in (list, tuple) else value


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Count two products.

    Several query heads read one grouped key or value head, which torch 2.11 does not count.
    """
    return 2 * _scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Count five products: the scores, and gradients of probabilities, values, queries, keys."""
    return 2 * _scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: Any, key: Any) -> int:
    return prod(query.shape[:-1]) * key.shape[-2]


def _recurrent(steps: Any, *weights: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Count two operations for each weight of both matrices, at each position."""
    return 2 * prod(steps.shape[:-1]) * sum(matrix.numel() for matrix in weights[:2])


def _recurrent_backward(steps: Any, *weights: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * _recurrent(steps, *weights, out_val=out_val, **kwargs)


def _packed_recurrent(steps: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    return 2 * prod(steps.shape[:-1]) * sum(one.numel() for one in weights if one.dim() == 2)


def _summed(source: Any, dims: Any = None, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Count one operation for each entry added across rows.

    Sums along a row read adjacent entries and are not counted.
    """
    strides = [(stride, dim) for dim, stride in enumerate(source.stride()) if source.shape[dim] > 1]
    summed = range(source.dim()) if not dims else [dim % source.dim() for dim in dims]
    return source.numel() if strides and min(strides)[1] not in summed else 0


def _added_products(_total: Any, left: Any, right: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    return 2 * prod(left.shape) * right.shape[-1]


_aten = torch.ops.aten
_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_FORMULAS: dict[Any, Callable[..., int]] = {
    **{getattr(_aten, f"_scaled_dot_product_{kernel}"): _attention for kernel in _KERNELS},
    **{getattr(_aten, f"_scaled_dot_product_{kernel}_backward"): _attention_backward for kernel in _KERNELS},
    _aten._scaled_dot_product_attention_math_for_mps: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten._cudnn_rnn: _packed_recurrent,
    _aten.baddbmm_: _added_products,
    _aten.sum: _summed,
    _aten.mean: _summed,
}
