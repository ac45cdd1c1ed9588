"""Sampling of completions: its options, its result, and the draw of a token from logits."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.grpo.rollout.few_rows.operators import draws_by_kernel
from lightning_unified.nn.token_log_probs import filter_logits

__all__ = ["CompletionSampler", "Completions", "SamplingOptions", "draw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(Sampling):
    """Sampling of completions for a batch of prompts: `Sampling`, and a group size.

    Attributes:
        group_size: Completions of each prompt, G.

    Raises:
        ValueError: If a number is out of range.
    """

    group_size: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}; give 1 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """Sampled completions: N = P x G rows, G for each prompt in a row, T tokens of the longest.

    Attributes:
        ids: Tokens (N, T), int64; 0 where the mask is False.
        mask: Whether each token belongs to its completion (N, T), the ending one included.
        log_probs: Log-probabilities of the sampled tokens (N, T), float32, by the softmax over all tokens at the sampling
            temperature; 0 where the mask is False.
        ended: Whether each row ended by itself (N); the others were truncated.
        decoding: The method of `Sampler`, one of `DECODINGS` except "auto"; None for another sampler.
    """

    ids: Tensor
    mask: Tensor
    log_probs: Tensor
    ended: Tensor
    decoding: str | None = None


class CompletionSampler(Protocol):
    """Protocol of a sampler, such as `rollout.Sampler`."""

    def __call__(self, prompt: Tensor, prompt_mask: Tensor, options: SamplingOptions, /) -> Completions:
        """Return `options.group_size` completions of each prompt (P, S)."""
        ...


def draw(
    logits: Tensor, options: SamplingOptions, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return a token (N) for each row of `logits` (N, V), and its log-probability in float32.

    The log-probability is that of the softmax over all tokens at this temperature (at 1 if it is 0): top_k and top_p restrict the
    draw, not the trained distribution. The draw adds Gumbel noise and takes the largest value, without waiting for the device.
    """
    is_whole = not options.top_k and options.top_p == 1
    if is_whole and logits.is_cuda and draws_by_kernel(logits.device):
        from lightning_unified.models.grpo.rollout.few_rows.triton_draw import draw_tokens

        noise = None
        if options.temperature:
            noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            noise.exponential_(generator=generator)
        return draw_tokens(logits.contiguous(), noise, temperature=options.temperature or 1.0)
    scores = logits.float() / (options.temperature or 1.0)
    if options.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        noise = torch.empty_like(scores).exponential_(generator=generator).log_()
        tokens = (filter_logits(scores, top_k=options.top_k, top_p=options.top_p) - noise).argmax(-1)
    return tokens, scores.gather(-1, tokens[:, None])[:, 0] - _log_total(scores)


def _log_total(scores: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials (N) of scores (N, V).

    It sums in parts: for one row, a GPU's softmax occupies a single processor.
    """
    parts = math.gcd(scores.shape[1], 64)
    return scores.unflatten(1, (parts, -1)).logsumexp(-1).logsumexp(-1)
