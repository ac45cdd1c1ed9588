"""The reader trained from scratch: a pre-norm GPT-2 decoder from embeddings to vectors.

It takes embeddings, not token ids, because gates may change them. It reads from left to right or from both sides with the same weights
(Dong et al. 2019, "Unified Language Model Pre-training").

Letters for shapes: B texts, S slots of a sequence, D width, H heads, V vocabulary.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_unified.models.decoder_sizes import DecoderSizes, check_parameters
from lightning_unified.nn.checkpoint import recompute as run_recomputed

__all__ = ["NEWLINE", "Reader", "embeddings_among"]

_INITIAL_STD = 0.02
NEWLINE = 198  # in the vocabularies of GPT-2 and SmolLM2


def embeddings_among(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask and a separator embedding (D) from a trained token table (V, D).

    The mask embedding is the mean of the table, the separator a line end.
    """
    weight = tokens.detach()
    return weight.mean(0), weight[min(NEWLINE, len(weight) - 1)].clone()


class _Block(nn.Module):
    def __init__(self, config: DecoderSizes) -> None:
        super().__init__()
        self.heads = config.heads
        self.ln_attention = nn.LayerNorm(config.width, eps=1e-5)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.ln_feed_forward = nn.LayerNorm(config.width, eps=1e-5)
        self.inner = nn.Linear(config.width, config.feed_forward)
        self.outer = nn.Linear(config.feed_forward, config.width)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        B, S, D = x.shape
        qkv = self.qkv(self.ln_attention(x)).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        causal = visible is None
        y = functional.scaled_dot_product_attention(*qkv, attn_mask=visible, is_causal=causal)
        x = x + self.dropout(self.projection(y.transpose(1, 2).reshape(B, S, D)))
        inner = functional.gelu(self.inner(self.ln_feed_forward(x)), approximate="tanh")
        return x + self.dropout(self.outer(inner))


class Reader(nn.Module):
    """Decoder from embeddings to one vector a slot; the token table is the tied head.

    Args:
        config: The sizes.
        recompute: Activation checkpointing of each block; parameters and state-dict keys are the same.

    Raises:
        RuntimeError: If the number of parameters differs from the configuration's.
    """

    def __init__(self, config: DecoderSizes, *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.ln_final = nn.LayerNorm(config.width, eps=1e-5)
        self._initialise()
        check_parameters(self, stated=config.parameters)

    @torch.no_grad()
    def _initialise(self) -> None:
        # the two projections into the residual stream are scaled by depth: Radford et al. 2019, section 2.3
        into_stream = _INITIAL_STD / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                is_projection = name.endswith(("projection", "outer"))
                nn.init.normal_(module.weight, std=into_stream if is_projection else _INITIAL_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        """The token table (V, D), which is also the output layer."""
        return self.token_embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings (..., D) of token ids."""
        return self.token_embedding(ids)

    @property
    def copy_offset(self) -> int:
        """The fixed position at which the copy of a text begins."""
        return self.config.positions // 2

    def own_embeddings(self) -> tuple[Tensor, Tensor]:
        """Return the initial mask embedding and separator, each (D)."""
        width = self.config.width
        return torch.randn(width) * _INITIAL_STD, torch.randn(width) * _INITIAL_STD

    def layers(self) -> list[nn.Module]:
        """Return the blocks in the order in which they run."""
        return list(self.blocks)

    @override
    def forward(self, embeddings: Tensor, positions: Tensor | None = None, visible: Tensor | None = None) -> Tensor:
        """Return the vectors (B, S, D) after the last layer norm.

        Shapes:
            embeddings (B, S, D); positions (B, S) or None; visible (B, 1, 1, S) bool or None.

        Args:
            embeddings: Of tokens, gates and separators.
            positions: Row of the position table at each slot; by default 0 to S - 1.
            visible: Slots that every slot attends to, on both sides; None reads from left to right.

        Raises:
            ValueError: If the sequence exceeds the reader's positions.
        """
        S = embeddings.shape[1]
        if self.config.positions < S:
            raise ValueError(f"{S} slots; this reader has {self.config.positions} positions. Shorten the text.")
        if positions is None:
            positions = torch.arange(S, device=embeddings.device).unsqueeze(0)
        x = self.dropout(embeddings + self.position_embedding(positions))
        for block in self.blocks:
            x = run_recomputed(block, x, visible) if self.recompute and self.training else block(x, visible)
        return self.ln_final(x)
