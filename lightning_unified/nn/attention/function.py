"""Attention in chunks, with the arguments of torch's `scaled_dot_product_attention`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.nn.attention.chunks import Call, attention_in_chunks, queries_of_chunk
from lightning_unified.nn.autograd_limits import in_a_transform

__all__ = ["TORCHS", "attention_or_none"]

TORCHS: Any = functional.scaled_dot_product_attention


def attention_or_none(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention of a call in training; None if torch's own function must compute it.

    Torch answers calls without gradients, calls inside `torch.func` transforms, tensor subclasses with a function of their own, nested
    tensors, and arguments that it refuses.
    """
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if not torch.is_grad_enabled() or in_a_transform() or not all(map(_is_plain, tensors)):
        return None
    query, key, value, *masks = tensors = _as_autocast_does(tensors)
    if not _is_valid(tensors, causal=is_causal, dropout=dropout_p):
        return None
    mask = masks[0] if masks else None
    if query.dim() == 2:
        output = attention_or_none(query[None], key[None], value[None], mask, dropout_p, is_causal, scale=scale)
        return None if output is None else output[0]
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    query, key, value, mask = _broadcast(query, key, value, mask, heads=groups > 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    call = Call(
        causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout=dropout_p,
        groups=groups,
        chunk=queries_of_chunk(
            heads=query.shape[-3] if query.dim() > 3 else 1,
            queries=query.shape[-2],
            keys=key.shape[-2],
            entry_bytes=wide.itemsize,
        ),
    )
    return attention_in_chunks(call, query, key, value, mask)


def _is_valid(tensors: list[Tensor], *, causal: bool, dropout: float) -> bool:
    query, key, value, *masks = tensors
    return (
        all(each.is_floating_point() and each.dim() > 1 and each.numel() > 0 for each in (query, key, value))
        and query.dtype == key.dtype == value.dtype
        and query.dim() == key.dim() == value.dim()
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and all(each.dtype in (torch.bool, torch.float32, query.dtype) and each.dim() > 1 for each in masks)
        and not (causal and masks)
        and 0.0 <= dropout <= 1.0
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and type(tensor).__torch_function__ in _PLAIN
    )


_PLAIN = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)


def _as_autocast_does(tensors: list[Tensor]) -> list[Tensor]:
    """Cast as autocast casts the arguments of torch's function: all but booleans and float64."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    wide = (torch.bool, torch.float64)
    return [each if each.dtype in wide else each.to(dtype) for each in tensors]


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, heads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Expand the leading dimensions to common ones; with `heads`, head counts may differ."""
    if mask is not None and (mask.shape[-2] not in (1, query.shape[-2]) or mask.shape[-1] != key.shape[-2]):
        mask = mask.expand(*mask.shape[:-2], query.shape[-2], key.shape[-2])
    end = -3 if heads else -2
    of_mask = [] if mask is None else [mask.shape[:end]]
    shape = torch.broadcast_shapes(query.shape[:end], key.shape[:end], value.shape[:end], *of_mask)
    query, key, value = (each.expand(*shape, *each.shape[end:]) for each in (query, key, value))
    return query, key, value, mask
