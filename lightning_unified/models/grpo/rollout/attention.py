"""Attention of one new token over a static cache that is not copied for groups of heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_unified.models.grpo.rollout.few_rows.operators import HALF, attend_token

__all__ = ["packed_attention"]

_NAME = "one_token_over_static_cache"
_WIDEST = 256  # width of a head whose tiles fit into a program's memory


@contextmanager
def packed_attention(lm: Any, *, by_kernel: bool) -> Iterator[None]:
    """Replace torch's attention (sdpa) in `lm` by one below while it decodes; others stay.

    Args:
        lm: A causal language model of transformers.
        by_kernel: Whether `attend_token` may compute it; otherwise it is torch's product.
    """
    config = lm.config.get_text_config()
    own = config._attn_implementation
    if own != "sdpa":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend_by_kernel if by_kernel else _attend)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attend with query (N, H, 1, D) to key and value (N, K, L, D).

    Each of the K heads serves H / K heads of the query. Query heads that share keys become rows of one head. The product is the same,
    and nothing is repeated.
    """
    if query.shape[2] != 1 or given.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    N, H, _, D = query.shape
    K = key.shape[1]
    rows = query.reshape(N, K, H // K, D)
    mixed = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=given.get("scaling")
    )
    return mixed.reshape(N, 1, H, value.shape[-1]), None


def _attend_by_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attend as above, by `attend_token` where it computes this attention."""
    (N, _, S, D), L = query.shape, key.shape[2]
    is_known = (
        S == 1
        and given.get("position_bias") is None
        and query.dtype in HALF
        and query.dtype == key.dtype == value.dtype
        and key.shape[3] == value.shape[3] == D <= _WIDEST
        and attention_mask is not None
        and attention_mask.shape == (N, 1, 1, L)
    )
    if not is_known:
        return _attend(module, query, key, value, attention_mask, **given)
    assert attention_mask is not None
    scale = D**-0.5 if given.get("scaling") is None else given["scaling"]
    return attend_token(query, key, value, attention_mask, scale).transpose(1, 2), None
