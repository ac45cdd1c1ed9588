"""Draw a token for each row of logits, with its log-probability."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Drawing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """Rules for drawing a token from logits.

    Attributes:
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Draw from the k likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that together reach this probability; 1 for all.

    Raises:
        ValueError: If one of them is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative; give 0 (the likeliest token) or more.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; give 0 (all tokens) or how many may be drawn.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is no share of probability; give more than 0 and at most 1.")

    def __call__(self, logits: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return a token (N) for each row of `logits` (N, V) and its log-probability (N) in float32.

        The log-probability is that of the softmax over all tokens at this temperature (at 1 if it is 0): top_k and top_p restrict
        the draw, not the trained distribution. The draw adds Gumbel noise and takes the largest value, without waiting for the
        device.
        """
        log_probs = torch.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)
        if self.temperature == 0:
            tokens = log_probs.argmax(-1)
        else:
            noise = torch.empty_like(log_probs).exponential_(generator=generator).log_()
            tokens = (self._allowed(log_probs) - noise).argmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _allowed(self, log_probs: Tensor) -> Tensor:
        if 0 < self.top_k < log_probs.shape[-1]:
            lowest = log_probs.topk(self.top_k, dim=-1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < lowest, -torch.inf)
        if self.top_p < 1:
            ordered, order = log_probs.softmax(-1).sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            log_probs = log_probs.masked_fill(
                torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p), -torch.inf
            )
        return log_probs
