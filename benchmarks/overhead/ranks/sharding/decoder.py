"""A decoder like Llama's, whose blocks and remaining parameters `fully_shard` groups."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["LARGE", "SMALL", "Decoder", "adamw"]

LARGE = {
    "width": 3072, "depth": 24, "heads": 24, "groups": 8, "inner": 8192, "vocabulary": 128256, "length": 1024, "rows": 16,
    "parameters": 3_204_074_496, "precision": "bf16-true",
}  # fmt: skip
SMALL = {
    "width": 128, "depth": 4, "heads": 4, "groups": 2, "inner": 256, "vocabulary": 8192, "length": 128, "rows": 32,
    "parameters": 2_688_128, "precision": "32-true",
}  # fmt: skip


class Block(nn.Module):
    """Attention with grouped heads and rotated positions, and a gated perceptron.

    Its activations are recomputed inside FSDP2's hooks.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        width, inner = case["width"], case["inner"]
        self.heads, self.groups, self.size = case["heads"], case["groups"], width // case["heads"]
        self.norm, self.norm_inner = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, self.groups * self.size, bias=False)
        self.value = nn.Linear(width, self.groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, *, recompute: bool) -> Tensor:
        if not recompute:
            return self._layers(x, cosine, sine)
        return checkpoint(self._layers, x, cosine, sine, use_reentrant=False, preserve_rng_state=False)

    def _layers(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normal = self.norm(x)
        query, key = (
            _rotated(_in_heads(layer(normal), count), cosine, sine)
            for layer, count in ((self.query, self.heads), (self.key, self.groups))
        )
        value = _in_heads(self.value(normal), self.groups)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normal = self.norm_inner(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def _in_heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Decoder(nn.Module):
    """A decoder like Llama's, on the meta device; returns the mean loss over tokens."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.size = case["width"] // case["heads"]
        with torch.device("meta"):
            self.embed = nn.Embedding(case["vocabulary"], case["width"])
            self.blocks = nn.ModuleList(Block(case) for _ in range(case["depth"]))
            self.norm = nn.RMSNorm(case["width"], eps=1e-5)
            self.head = nn.Linear(case["width"], case["vocabulary"], bias=False)
        if case["precision"] == "bf16-true":
            self.to(torch.bfloat16)
        count = sum(parameter.numel() for parameter in self.parameters())
        assert count == case["parameters"], f"the decoder has {count} parameters"

    def forward(self, tokens: Tensor, labels: Tensor, *, recompute: bool) -> Tensor:
        x = self.embed(tokens)
        speeds = 500000.0 ** (-torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32), speeds).repeat(1, 2)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine, recompute=recompute)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard each block, and the rest as one group."""
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


def adamw(module: nn.Module, accelerator: str) -> torch.optim.Optimizer:
    if accelerator == "cuda":
        return torch.optim.AdamW(module.parameters(), 1e-4, fused=True)
    return torch.optim.AdamW(module.parameters(), 1e-4, foreach=False)
