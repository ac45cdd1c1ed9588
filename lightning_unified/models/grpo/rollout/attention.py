"""Attention of one new token over a static cache that is not copied for groups of heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional

__all__ = ["packed_attention"]

_NAME = "one_token_over_static_cache"


@contextmanager
def packed_attention(lm: Any) -> Iterator[None]:
    """Replace torch's attention (sdpa) in `lm` by the one below while it decodes; others stay."""
    config = lm.config.get_text_config()
    own = config._attn_implementation
    if own != "sdpa":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
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
