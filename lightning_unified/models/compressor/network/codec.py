"""Codec: policy, reader and two embeddings, which compress, restore and continue a text.

Letters for shapes: B texts, K masks of a text, T tokens, U tokens of a continuation, D width, V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_unified.models.compressor.network.gpt2 import load_gpt2
from lightning_unified.models.compressor.network.policy import KeepPolicy
from lightning_unified.models.compressor.network.reader import Reader, embeddings_among
from lightning_unified.models.compressor.network.slots import compact, followed_by, gated, with_separator
from lightning_unified.models.compressor.sizes import CompressorConfig
from lightning_unified.nn.linear_cross_entropy import IGNORED, linear_cross_entropy

if TYPE_CHECKING:
    from lightning_unified.models.compressor.network.pretrained import PretrainedReader

__all__ = ["Codec", "keep_top"]


class Codec(nn.Module):
    """The networks of a compressor: they choose tokens, restore a text and continue it.

    `loss_chunk_rows` may be set at any time: the tokens of a chunk of the loss; None chooses.

    Args:
        config: The sizes.
        recompute: Activation checkpointing of the reader's blocks.
        load_pretrained: Whether to load a pretrained reader's weights; False if a checkpoint follows.
        gpt2: Source of GPT-2's weights for a reader of its architecture, see `gpt2.load_gpt2`; None for none.
    """

    loss_chunk_rows: int | None = None

    def __init__(
        self,
        config: CompressorConfig,
        *,
        recompute: bool = False,
        load_pretrained: bool = True,
        gpt2: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.policy = KeepPolicy(config.policy, width=config.reader.width)
        self.reader = _reader(config, recompute=recompute, load=load_pretrained)
        mask_embedding, separator = self.reader.own_embeddings()
        if gpt2 is not None and load_pretrained and isinstance(self.reader, Reader) and not torch.empty(0).is_meta:
            load_gpt2(self.reader, gpt2)
            mask_embedding, separator = embeddings_among(self.reader.head_weight)
        self.mask_embedding, self.separator = nn.Parameter(mask_embedding), nn.Parameter(separator)

    def keep_logits(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return the log-odds (B, T) of keeping each token, in at least fp32.

        No gradient reaches the embeddings (B, T, D).
        """
        logits = self.policy(embeddings.detach(), mask)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def restored(self, embeddings: Tensor, *, gates: Tensor, mask: Tensor) -> Tensor:
        """Return the reader's vectors (B, T, D) that predict each token of the gated text.

        Shapes:
            embeddings (B, T, D), gates (B, T), mask (B, T) bool.
        """
        x = gated(embeddings, gates=gates, mask_embedding=self.mask_embedding)
        if self.config.reading == "infill":
            visible = mask | ~mask.any(1, keepdim=True)  # attention over nothing would be NaN for a row of pads
            return self.reader(x, visible=visible[:, None, None])
        B, T = mask.shape
        layout = followed_by(x, embeddings, first_real=mask, second_real=mask, separator=self.separator)
        positions = None
        if self.reader.copy_offset is not None:
            places = torch.arange(T, device=mask.device)
            positions = layout.at_front(torch.cat([places, places + self.reader.copy_offset]).expand(B, -1))
        return layout.back(self.reader(layout.embeddings, positions), start=T)

    def continued(self, embeddings: Tensor, *, real: Tensor, continuation: Tensor, continuation_mask: Tensor) -> Tensor:
        """Return the reader's vectors (B, U, D) that predict the continuation.

        It follows the slots that are `real`.

        Shapes:
            embeddings (B, T, D), real (B, T) bool, continuation (B, U) int64, continuation_mask (B, U) bool.
        """
        layout = followed_by(
            embeddings,
            self.reader.embed(continuation),
            first_real=real,
            second_real=continuation_mask,
            separator=self.separator,
        )
        return layout.back(self.reader(layout.embeddings), start=embeddings.shape[1])

    def restoring_losses(self, ids: Tensor, *, embeddings: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
        """Return the cost of restoring each token in nats (B, K, T), 0 at pads.

        Shapes:
            ids (B, T), embeddings (B, T, D), gates (B, K, T), mask (B, T) bool.
        """
        B, K, T = gates.shape
        rows = embeddings.unsqueeze(1).expand(-1, K, -1, -1).flatten(0, 1)
        real = mask.unsqueeze(1).expand(-1, K, -1).flatten(0, 1)
        hidden = self.restored(rows, gates=gates.flatten(0, 1), mask=real)
        labels = torch.where(mask, ids, IGNORED).unsqueeze(1).expand(-1, K, -1).flatten(0, 1)
        return self._losses(hidden, labels=labels).view(B, K, T)

    def continuing_losses(
        self,
        *,
        embeddings: Tensor,
        gates: Tensor,
        mask: Tensor,
        continuation: Tensor,
        continuation_mask: Tensor,
    ) -> Tensor:
        """Return the cost of each continuation token in nats (B, K, U), 0 at pads.

        Gates of 0 and 1 (a boolean tensor) remove dropped tokens: the reader gets the kept ones side by side. Gates in between keep
        all slots, and the mask's embedding replaces the dropped share.

        Shapes:
            embeddings (B, T, D), gates (B, K, T), mask (B, T) bool, continuation and continuation_mask (B, U).
        """
        B, K, T = gates.shape
        rows = embeddings.unsqueeze(1).expand(B, K, T, -1)
        real = mask.unsqueeze(1).expand(-1, K, -1)
        if gates.dtype == torch.bool:
            real = real & gates
        else:
            rows = gated(rows, gates=gates, mask_embedding=self.mask_embedding)
        follow = continuation.unsqueeze(1).expand(-1, K, -1).flatten(0, 1)
        follow_mask = continuation_mask.unsqueeze(1).expand(-1, K, -1).flatten(0, 1)
        hidden = self.continued(
            rows.flatten(0, 1), real=real.flatten(0, 1), continuation=follow, continuation_mask=follow_mask
        )
        return self._losses(hidden, labels=torch.where(follow_mask, follow, IGNORED)).view(B, K, -1)

    def language_loss(self, ids: Tensor, *, embeddings: Tensor, keep: Tensor, mask: Tensor, starts: Tensor) -> Tensor:
        """Return the summed loss of the tokens from `starts` on, given the kept tokens before them.

        At a start of 0 this is plain language modelling.

        Shapes:
            ids (B, T), embeddings (B, T, D), keep and mask (B, T) bool, starts (B) int64.
        """
        layout = with_separator(embeddings, keep=keep, mask=mask, starts=starts, separator=self.separator)
        scored = mask & (torch.arange(ids.shape[1], device=ids.device) >= starts.unsqueeze(1))
        labels = layout.at_front(torch.where(scored, ids, IGNORED) - IGNORED) + IGNORED
        return self._losses(self.reader(layout.embeddings), labels=labels).sum()

    def next_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the next-token logits (B, T, V) of the whole text."""
        embeddings = self.reader.embed(ids)
        start = self.separator.to(embeddings.dtype).expand(len(ids), 1, -1)
        layout = compact(torch.cat([start, embeddings], dim=1), real=functional.pad(mask, (1, 0), value=True))
        return self.scores(layout.back(self.reader(layout.embeddings), start=1))

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) from the reader's vectors (..., D)."""
        return functional.linear(hidden, self.reader.head_weight)

    @override
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the log-odds (B, T) of keeping each token."""
        return self.keep_logits(self.reader.embed(ids), mask)

    def _losses(self, hidden: Tensor, *, labels: Tensor) -> Tensor:
        weight = self.reader.head_weight
        return linear_cross_entropy(
            hidden, weight=weight, labels=labels, reduction="none", chunk_rows=self.loss_chunk_rows
        )


def _reader(config: CompressorConfig, *, recompute: bool, load: bool) -> "Reader | PretrainedReader":
    if config.pretrained is None:
        return Reader(config.reader, recompute=recompute)
    from lightning_unified.models.compressor.network.pretrained import PretrainedReader

    return PretrainedReader(config.pretrained, config.reader, load=load, recompute=recompute)


def keep_top(logits: Tensor, *, mask: Tensor, ratio: float) -> Tensor:
    """Return the mask (B, T) of the share `ratio` of each text's tokens, rounded.

    The tokens with the highest logits are kept. Of equal logits the earlier token is kept.

    Raises:
        ValueError: If the ratio is not in [0, 1].
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"a keep ratio of {ratio} is not a share; give 0.0 to 1.0.")
    order = logits.masked_fill(~mask, float("-inf")).argsort(dim=1, descending=True, stable=True)
    counts = (mask.sum(1, keepdim=True) * ratio).round()
    first = torch.arange(logits.shape[1], device=logits.device) < counts
    return torch.zeros_like(mask).scatter(1, order, first) & mask
