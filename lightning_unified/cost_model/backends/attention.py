"""Run scaled dot-product attention as the target's dispatcher does.

Autograd then saves the tensors it would save on the target. With B rows, H heads, Sq queries, Sk keys and E entries a head,
the kernels save queries, keys, values, output and:

| kernel | chosen for | saved in addition |
|---|---|---|
| cuDNN | half precision on Hopper and Blackwell, masks too | log-sum-exp of each query, 4·B·H·Sq bytes; output and gradients have the memory layout of queries, keys and values |
| flash | half precision without a mask | the same log-sum-exp |
| efficient | float32; a mask elsewhere | the same, with Sq rounded up to 32 |
| math | a mask whose last entries lie apart, grouped heads in float32, heads of unequal or unaligned size, inputs that are not 4-D, MPS in training | probabilities, B·H·Sq·Sk entries, in float32 for half-precision inputs; with dropout a second such tensor and its mask |

Source: the conditions of `select_sdp_backend` and its filters in torch's `transformers/cuda/sdp_utils.cpp` and
`transformers/attention.cpp`. An H200's allocations under torch 2.11 confirm cuDNN in half precision with and without a mask,
and math for grouped heads in float32.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.cost_model.backends.device import generation

__all__ = ["cuda_attention", "mps_attention", "rocm_attention"]

_LOW = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_CUDNN_FIRST = (9, 10)  # compute capabilities (major) on which torch prefers cuDNN
_LARGEST_CUDNN_HEAD = {9: 256}
_HEAD_MULTIPLE = 8  # flash pads heads to this multiple; cuDNN requires it
_BIAS_MULTIPLE = 16  # the efficient kernel pads the mask's last dimension to this multiple
_ALIGNMENT_BYTES = 16  # alignment of a head's entries for the efficient kernel
_DENSE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """Arguments of one attention call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def cuda_attention(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run attention as CUDA does: cuDNN on GPUs that prefer it, else flash, efficient or math."""
    call = _bind(*args, **kwargs)
    return _cudnn(call) if _cudnn_runs(call) else rocm_attention(plain, *args, **kwargs)


def rocm_attention(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run attention as ROCm does, and CUDA without cuDNN: flash, else efficient, else math."""
    call = _bind(*args, **kwargs)
    if _flash_runs(call):
        return _flash(call)
    if _efficient_runs(call):
        return _efficient(call)
    return _math(call)


def mps_attention(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Run attention as MPS does: its own kernel without gradients and dropout, else math."""
    call = _bind(*args, **kwargs)
    rest = (call.mask, call.dropout, call.causal)
    if call.trains or call.dropout > 0 or call.query.dim() != _DENSE:
        return torch.ops.aten._scaled_dot_product_attention_math(
            call.query, call.key, call.value, *rest, scale=call.scale, enable_gqa=call.grouped
        )[0]
    key, value = _repeated(call)
    return torch.ops.aten._scaled_dot_product_attention_math_for_mps(call.query, key, value, *rest, scale=call.scale)[0]


def _bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Call:
    return _Call(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        scale=scale,
        grouped=enable_gqa,
    )


def _fused_shapes(call: _Call) -> bool:
    tensors = (call.query, call.key, call.value)
    dense = all(t.dim() == _DENSE and t.numel() > 0 and t.stride(-1) == 1 for t in tensors)
    dense = dense and (call.mask is None or call.mask.stride(-1) == 1)  # a permuted table of biases has no such stride
    if not dense or len({t.dtype for t in tensors}) > 1 or len({t.shape[0] for t in tensors}) > 1:
        return False
    heads = {t.shape[1] for t in tensors}
    return len(heads) == 1 or call.grouped


def _cudnn_runs(call: _Call) -> bool:
    heads = {t.shape[-1] for t in (call.query, call.key, call.value)}
    return (
        generation() in _CUDNN_FIRST
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        and _fused_shapes(call)
        and call.query.dtype in _LOW
        and max(heads) <= _LARGEST_CUDNN_HEAD.get(generation(), 128)
        and not any(head % _HEAD_MULTIPLE for head in heads)
        and call.key.shape[-2] > 1
        and not (call.query.shape[-2] == 1 and call.dropout)
        and _cudnn_reads(call)
    )


def _cudnn_reads(call: _Call) -> bool:
    """Return whether cuDNN takes the mask.

    It takes none that is learned, and masks of two or four dimensions that broadcast to the scores.

    Source: `check_attn_mask_shape` in torch's `transformers/sdp_utils_cpp.h`.
    """
    if call.mask is None:
        return True
    scores = (*call.query.shape[:-1], call.key.shape[-2])
    fits = all(have in (1, want) for have, want in zip(call.mask.shape[::-1], scores[::-1], strict=False))
    return not call.mask.requires_grad and call.mask.dim() in (2, _DENSE) and fits


def _flash_runs(call: _Call) -> bool:
    heads = {t.shape[-1] for t in (call.query, call.key, call.value)}
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and _fused_shapes(call)
        and call.mask is None
        and call.query.dtype in _LOW
        and len(heads) == 1
        and max(heads) <= _LARGEST_HEAD
        and not (call.causal and call.query.shape[-2] != call.key.shape[-2])
    )


def _efficient_runs(call: _Call) -> bool:
    multiple = _ALIGNMENT_BYTES // call.query.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and _fused_shapes(call)
        and call.query.shape[1] == call.key.shape[1] == call.value.shape[1]
        and call.query.dtype in {*_LOW, torch.float32}
        and call.query.shape[-1] == call.key.shape[-1]
        and all(t.shape[-1] % multiple == 0 for t in (call.query, call.value))
    )


def _scale(call: _Call) -> float:
    return 1.0 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale


def _cudnn(call: _Call) -> Tensor:
    mask = _additive(call)
    bias = None if mask is None else mask.expand(*call.query.shape[:-1], call.key.shape[-2])
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, bias, call.trains, call.dropout, call.causal, False, scale=call.scale
    )[0]


def _flash(call: _Call) -> Tensor:
    size = call.query.shape[-1]
    short = -size % _HEAD_MULTIPLE
    query, key, value = (functional.pad(t, (0, short)) if short else t for t in (call.query, call.key, call.value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.causal, return_debug_mask=False, scale=_scale(call)
    )[0]
    return out[..., :size] if short else out


def _efficient(call: _Call) -> Tensor:
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, _bias(call), call.trains, call.dropout, call.causal, scale=call.scale
    )
    return out[0]


def _additive(call: _Call) -> Tensor | None:
    """Return the mask as a bias added to the scores, in the queries' dtype."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    return torch.where(call.mask, 0.0, -math.inf).to(call.query.dtype)


def _bias(call: _Call) -> Tensor | None:
    """Return the bias added to the scores, its rows padded, expanded to each head of each row."""
    bias = _additive(call)
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys > 1 and keys % _BIAS_MULTIPLE:
        bias = functional.pad(bias, (0, -keys % _BIAS_MULTIPLE))[..., :keys]
    return bias.expand(*call.query.shape[:-1], call.key.shape[-2])


def _repeated(call: _Call) -> tuple[Tensor, Tensor]:
    key, value = call.key, call.value
    if call.grouped and key.shape[-3] != call.query.shape[-3]:
        times = call.query.shape[-3] // key.shape[-3]
        return key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    return key, value


def _math(call: _Call) -> Tensor:
    """Take the steps of torch's math attention on a GPU.

    The mask is added in place, and dropout saves a mask of booleans.
    """
    query, half = call.query, call.query.dtype in _LOW
    root = math.sqrt(_scale(call))
    query = (query.float() if half else query) * root
    mask = call.mask
    if call.causal:
        mask = torch.ones(query.shape[-2], call.key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)
    key, value = (each.float() if half else each for each in _repeated(call))
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores += mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if call.dropout > 0:
        weights = torch.native_dropout(weights, call.dropout, train=True)[0]
    low = weights.to(call.query.dtype) if half else None  # torch returns the probabilities too
    out = weights @ value
    del low
    return out.to(call.query.dtype) if half else out
