"""Rules for drawing the next token, and the draw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_unified.nn.token_log_probs import filter_logits

__all__ = ["Sampling", "draw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Rules for drawing the next token.

    Attributes:
        max_new_tokens: Stop after this many.
        temperature: Divides the logits; 0 takes the likeliest token (greedy).
        top_k: Draw from the k likeliest tokens; 0 from all.
        top_p: Draw from the likeliest tokens that together reach this probability (Holtzman et al. 2020); 1 from all.

    Raises:
        ValueError: If a number is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 0.9

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; give 1 or more.")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}; give 0 (greedy) or more.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}; give 1 or more, or 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; give a share above 0, at most 1.")


def draw(logits: Tensor, *, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Return the next tokens (B) for logits (B, V) in fp32."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = filter_logits(logits / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
