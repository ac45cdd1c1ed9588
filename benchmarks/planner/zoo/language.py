"""Language models of plain PyTorch, and GearHead.

An encoder, an encoder-decoder, and decoders with experts, with LoRA, and with a large tied table.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.planner.zoo.learner import make_optimizer
from lightning_unified.models.gearhead.module import GearHead

__all__ = ["Classifier", "Decoder", "Diagnostics", "LoRALinear", "Translator", "add_lora"]


class Diagnostics(GearHead):
    """GearHead with one of the benchmarks' optimizers."""

    def __init__(self, *, optimizer: str, **options) -> None:
        super().__init__(**options)
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.optimizer)


class Classifier(nn.Module):
    """BERT-like: torch's own encoder with dropout and a padding mask; one class a text."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, length: int, classes: int = 8) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, padded: Tensor, label: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.table(tokens) + self.places(places), src_key_padding_mask=padded)
        return F.cross_entropy(self.head(hidden[:, 0]), label)


class Translator(nn.Module):
    """Encoder and decoder, torch's own, between two texts."""

    def __init__(self, *, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.body = nn.Transformer(width, width // 64, depth, depth, 4 * width, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        given = target[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1], device=given.device)
        hidden = self.body(self.table(source), self.table(given), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target[:, 1:].flatten())


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, *, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(module: nn.Module, *, rank: int) -> nn.Module:
    """Freeze `module`, and put LoRA at every linear layer inside its blocks."""
    module.requires_grad_(requires_grad=False)
    for block in module.blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, LoRALinear(child, rank=rank))
    return module


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))


class _Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.inner(x)))


class _Experts(nn.Module):
    """Two of several experts for each token.

    With a capacity, each expert has a fixed number of places, and tokens beyond it pass by: no shape hangs on a value. Without,
    each expert takes the tokens that chose it, as many as they are.
    """

    def __init__(self, width: int, *, experts: int, capacity: float | None) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.inner = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.out = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        mixed = (
            self._by_value(tokens, weights, chosen)
            if self.capacity is None
            else self._by_place(tokens, weights, chosen)
        )
        return mixed.view_as(x)

    def _by_place(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        (count, width), experts = tokens.shape, self.router.out_features
        places = math.ceil(self.capacity * 2 * count / experts)
        chosen, weights = chosen.flatten(), weights.flatten()
        rank = F.one_hot(chosen, experts).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
        slot = torch.where(rank < places, chosen * places + rank, experts * places)  # the last is for all that pass by
        gathered = tokens.new_zeros(experts * places + 1, width).index_copy(0, slot, tokens.repeat_interleave(2, 0))
        inside = torch.bmm(gathered[:-1].view(experts, places, width), self.inner)
        done = torch.bmm(F.gelu(inside), self.out).flatten(0, 1)
        done = torch.cat([done, done.new_zeros(1, width)])[slot]
        return (done * weights[:, None]).view(count, 2, width).sum(1)

    def _by_value(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.router.out_features):
            rows, which = (chosen == expert).nonzero(as_tuple=True)
            done = F.gelu(tokens[rows] @ self.inner[expert]) @ self.out[expert]
            out = out.index_add(0, rows, (done * weights[rows, which, None]).to(out.dtype))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = _Attention(width), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_feed_forward(x))


class Decoder(nn.Module):
    """A causal language model whose head is its table.

    With `experts`, its feed-forward layers are mixtures.
    """

    def __init__(
        self, *, vocabulary: int, width: int, depth: int, length: int, experts: int = 0, capacity: float | None = None
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.blocks = nn.ModuleList(
            _Block(width, _Experts(width, experts=experts, capacity=capacity) if experts else _Dense(width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        given = tokens[:, :-1]
        x = self.table(given) + self.places(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
