"""Floating-point operations of what torch's own counter has no formula for."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["own_flops"]


def own_flops(func: Any) -> Callable[..., int] | None:
    """Return the formula for `func`, which takes its arguments and `out_val`; None where there is none."""
    return _FORMULAS.get(getattr(func, "_overloadpacket", None))


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _recurrent(steps: Any, *weights: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """Two for each weight at each position: matrices of inputs and of hidden states, whichever arguments they are."""
    matrices = [one for one in weights if isinstance(one, torch.Tensor) and one.dim() == 2]
    return 2 * prod(steps.shape[:-1]) * sum(matrix.numel() for matrix in matrices)


def _recurrent_backward(steps: Any, *weights: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * _recurrent(steps, *weights, out_val=out_val, **kwargs)


def _packed_recurrent(steps: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    return 2 * prod(steps.shape[:-1]) * sum(one.numel() for one in weights if one.dim() == 2)


def _summed(source: Any, dims: Any = None, *_: Any, out_val: Any = None, **__: Any) -> int:  # noqa: ARG001
    """One for each entry that is added to those of other rows; sums along a row are of entries that lie side by side, and not counted."""
    strides = [(stride, dim) for dim, stride in enumerate(source.stride()) if source.shape[dim] > 1]
    summed = range(source.dim()) if not dims else [dim % source.dim() for dim in dims]
    return source.numel() if strides and min(strides)[1] not in summed else 0


_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_attention_math_for_mps: _attention,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    _aten._cudnn_rnn: _packed_recurrent,
    _aten.sum: _summed,
    _aten.mean: _summed,
}
