"""The GearHead network: a pre-norm decoder with learned positions and a tied head.

It has an embedding of fault codes. Letters for shapes: B batch, T tokens, D width, H heads, K width of a head, V
vocabulary, C diagnoses.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_unified.models.decoder_sizes import check_parameters
from lightning_unified.models.gearhead.kv_cache import KVCache
from lightning_unified.models.gearhead.sizes import GearHeadConfig
from lightning_unified.nn.checkpoint import recompute as run_recomputed
from lightning_unified.nn.linear_cross_entropy import IGNORED, linear_cross_entropy

__all__ = ["GearHeadNetwork"]

_INITIAL_STD = 0.02


class _Attention(nn.Module):
    """Causal self-attention without dropout on its weights.

    Such dropout would materialize B x H x T x T.
    """

    def __init__(self, config: GearHeadConfig, *, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.heads, layer
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)

    @override
    def forward(self, x: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        B, T, D = x.shape
        queries, keys, values = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values = cache.append(self.layer, keys=keys, values=values)
        causal = mask is None and keys.shape[2] == T
        y = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal and T > 1)
        return self.projection(y.transpose(1, 2).reshape(B, T, D))


class _FeedForward(nn.Module):
    """Two linear layers with the exact (erf) GELU between them."""

    def __init__(self, config: GearHeadConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.feed_forward)
        self.projection = nn.Linear(config.feed_forward, config.width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.projection(functional.gelu(self.inner(x)))


class _Block(nn.Module):
    def __init__(self, config: GearHeadConfig, *, layer: int) -> None:
        super().__init__()
        self.ln_attention = nn.LayerNorm(config.width, eps=1e-5)
        self.attention = _Attention(config, layer=layer)
        self.ln_feed_forward = nn.LayerNorm(config.width, eps=1e-5)
        self.feed_forward = _FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, x: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.ln_attention(x), cache, mask))
        return x + self.dropout(self.feed_forward(self.ln_feed_forward(x)))


class GearHeadNetwork(nn.Module):
    """Decoder from token ids to one vector per position.

    Callers apply the head, possibly in chunks.

    Args:
        config: The sizes.
        recompute: Activation checkpointing of each block; parameters and state-dict keys are the same.

    Raises:
        RuntimeError: If the number of parameters differs from the configuration's.
    """

    def __init__(self, config: GearHeadConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.error_embedding = (
            nn.Embedding(config.num_error_codes, config.width, padding_idx=0) if config.num_error_codes else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config, layer=layer) for layer in range(config.layers))
        self.ln_final = nn.LayerNorm(config.width, eps=1e-5)
        self.diagnostic_head = nn.Linear(config.width, config.num_diagnoses) if config.num_diagnoses else None
        self._initialise()
        check_parameters(self, stated=config.parameters)

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                scaled = self.config.depth_scaled_init and name.endswith("projection")
                std = _INITIAL_STD / math.sqrt(2 * self.config.layers) if scaled else _INITIAL_STD
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if self.error_embedding is not None:
            self.error_embedding.weight[0].zero_()  # row 0 is "no code" and must add nothing

    @override
    def forward(
        self,
        input_ids: Tensor,
        error_code_ids: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        diagnosis_labels: Tensor | None = None,
        chunk_rows: int | None = None,
    ) -> Any:
        """Return the vectors after the last layer norm, or with `labels` the sums of the loss.

        The sums are the scalars `loss`, over tokens, `diagnosis_loss`, and `right`, the number of right diagnoses. Without a diagnostic
        head, the last two are 0. They are computed here, so that recorded calls (`CudaGraphs`) contain them.

        Shapes:
            input_ids, error_code_ids, positions, labels, diagnosis_labels (B, T); mask (B, 1, T, T_all), True where a token may attend;
            out (B, T, D).

        Args:
            input_ids: Token ids.
            error_code_ids: Row of the error table at each token, 0 for none; None is 0 everywhere.
            positions: By default 0 to T - 1, plus the cache's length.
            cache: Keys and values of earlier tokens; the method adds those of the new tokens.
            mask: By default each token attends to itself and all earlier ones. Needed if a batch is padded on the left, or
                several tokens follow a filled cache.
            labels: The tokens themselves, -100 where they are not scored. Position t is scored on label t + 1.
            diagnosis_labels: Subsystems, -100 where none is asked for; None asks nowhere.
            chunk_rows: Number of tokens of a chunk of the loss; None chooses.

        Raises:
            ValueError: If the text exceeds the network's positions, or a needed mask is missing.
        """
        T = input_ids.shape[1]
        held = cache.length if cache is not None else 0
        if held + T > self.config.positions and positions is None:
            raise ValueError(
                f"{held + T} tokens; this network has {self.config.positions} positions. Shorten the text."
            )
        if held and T > 1 and mask is None:
            raise ValueError(
                f"{T} tokens after {held} in the cache need a mask; give one, or feed one token at a time."
            )
        if positions is None:
            positions = torch.arange(held, held + T, device=input_ids.device).unsqueeze(0)
        places = self.position_embedding(positions)
        if self.error_embedding is not None and error_code_ids is None:
            # Called even without codes, so that every parameter takes part in every step (DDP waits for each gradient).
            places = places + self.error_embedding(positions.new_zeros(1, 1))
        x = self.token_embedding(input_ids) + places
        if self.error_embedding is not None and error_code_ids is not None:
            x = x + self.error_embedding(error_code_ids)
        x = self.dropout(x)
        for block in self.blocks:
            if self.recompute and self.training and cache is None:
                x = run_recomputed(block, x, None, mask)
            else:
                x = block(x, cache, mask)
        if cache is not None:
            cache.advance(T)
        hidden = self.ln_final(x)
        return hidden if labels is None else self._sums(hidden, labels, diagnosis_labels, chunk_rows)

    def _sums(
        self, hidden: Tensor, labels: Tensor, diagnosis_labels: Tensor | None, chunk_rows: int | None
    ) -> dict[str, Tensor]:
        # The labels are shifted, not the vectors: a copy of (B, T) integers is cheap, one of (B, T, D) is not.
        shifted, weight = functional.pad(labels[:, 1:], (0, 1), value=IGNORED), self.token_embedding.weight
        loss = linear_cross_entropy(hidden, weight=weight, labels=shifted, reduction="sum", chunk_rows=chunk_rows)
        if self.diagnostic_head is None:
            zero = torch.zeros((), device=hidden.device)
            return {"loss": loss, "diagnosis_loss": zero, "right": zero}
        scores = self.diagnose(hidden).flatten(0, 1)
        asked = (torch.full_like(labels, IGNORED) if diagnosis_labels is None else diagnosis_labels).flatten()
        diagnosis_loss = functional.cross_entropy(scores, asked, reduction="sum", ignore_index=IGNORED)
        return {"loss": loss, "diagnosis_loss": diagnosis_loss, "right": (scores.detach().argmax(-1) == asked).sum()}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of the next token, by the token table (tied head)."""
        return functional.linear(hidden, self.token_embedding.weight)

    def diagnose(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., C) of the subsystems.

        Raises:
            ValueError: If the network has no diagnostic head.
        """
        if self.diagnostic_head is None:
            raise ValueError(
                "this network has no diagnostic head; choose a preset that has one, such as gearhead-small."
            )
        return self.diagnostic_head(hidden)

    def new_cache(self, *, batch: int, length: int) -> KVCache:
        """Return an empty cache for `batch` texts of up to `length` tokens, on the model's device."""
        weight, heads = self.token_embedding.weight, self.config.heads
        return KVCache(
            layers=self.config.layers,
            batch=batch,
            heads=heads,
            length=length,
            head_width=self.config.width // heads,
            device=weight.device,
            dtype=weight.dtype,
        )
