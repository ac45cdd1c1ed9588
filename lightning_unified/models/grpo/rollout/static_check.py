"""Check that a step over a static cache gives the logits of the model's own cache."""

from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.causal_lm.language_model import beyond_rounding
from lightning_unified.models.grpo.rollout.growing_decoder import GrowingDecoder
from lightning_unified.models.grpo.rollout.static_decoder import StaticDecoder

__all__ = ["static_refusal"]


def static_refusal(lm: Any, cache: Any, *, mask: Tensor, logits: Tensor) -> str | None:
    """Return why a model needs its own cache; None if it does not.

    A step over a static cache must give the same logits. A model may read the length of its cache, or compute its positions from the mask. One step of two prompts, the shortest and the longest,
    shows whether it does.

    Args:
        lm: A causal language model of transformers.
        cache: Its cache of P prompts: keys and values of all tokens.
        mask: Mask of the prompt tokens (P, S).
        logits: Logits after the prompts (P, V).
    """
    by_length = mask.sum(1).argsort()
    rows = by_length[[0, -1]] if len(mask) > 1 else by_length
    few, there, tokens = _rows_of(cache, rows), mask[rows], logits[rows].argmax(-1)
    static, growing = StaticDecoder(lm, captured=False, compiled=False), GrowingDecoder(lm)
    try:
        static.begin(few, mask=there, group=1, new=1)
        found = static.step(tokens).clone()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise any exception
        return f"a step of {type(lm).__name__} over a static cache fails ({type(error).__name__}: {error})"
    growing.begin(few, mask=there, group=1)
    difference = beyond_rounding(found, growing.step(tokens), dtype=static.dtype)
    if difference is None:
        return None
    return f"the logits of {type(lm).__name__} over a static cache differ by {difference:.2g}"


def _rows_of(cache: Any, rows: Tensor) -> Any:
    """Return a copy of some rows of a cache of keys and values."""
    from transformers.cache_utils import DynamicCache

    copied = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copied.update(layer.keys[rows], layer.values[rows], index)
    return copied
