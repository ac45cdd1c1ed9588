"""Decode over the model's own cache, where it holds more than all tokens' keys and values."""

from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.causal_lm.language_model import RECURRENT, cache_argument, forward_last, is_recurrent

__all__ = ["GrowingDecoder", "can_select"]


def can_select(cache: Any) -> bool:
    """Return whether rows of a cache can be repeated and dropped.

    A layer with both keys and recurrent states would repeat its keys alone.
    """
    layers = getattr(cache, "layers", None) or [cache]
    return not is_recurrent(cache) and all(hasattr(layer, "batch_select_indices") for layer in layers)


class GrowingDecoder:
    """Decoder of one rollout over the own cache of a transformers model."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._attends = (
            cache_argument(lm) != RECURRENT
        )  # recurrent layers would take the mask of all tokens for the new one's
        self.rows = 0

    def begin(self, cache: Any, *, mask: Tensor, group: int) -> None:
        """Take the cache of prompts with mask (P, S), and repeat it for `group` rows each."""
        if group > 1:
            cache.batch_repeat_interleave(group)
        self._cache, self._mask = cache, mask.long().repeat_interleave(group, 0)
        self._selects, self.rows = can_select(cache), len(mask) * group

    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits (N, V) after one more token (N) of each row."""
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.rows, 1)], dim=1)
        logits, self._cache = forward_last(
            self._lm,
            input_ids=tokens[:, None],
            attention_mask=self._mask if self._attends else None,
            position_ids=positions,
            cache=self._cache,
        )
        return logits

    def rows_worth_keeping(self, live: int) -> int:
        """Return the number of rows to continue with when `live` rows have not ended."""
        return live if self._selects and 2 * live <= self.rows else self.rows

    def keep(self, rows: Tensor) -> None:
        """Continue with the rows `rows` (K) only, in their order."""
        self._cache.batch_select_indices(rows)
        self._mask, self.rows = self._mask[rows], len(rows)
