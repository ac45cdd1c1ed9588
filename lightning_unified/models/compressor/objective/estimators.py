"""Terms of the policy's objective, and the REINFORCE estimator.

The objective per token is J = E[distortion] + price * E[tokens kept] - entropy_weight * entropy. The distortion is the reader's cost of
dropped tokens in nats. The price is the cost of a kept token in nats. The entropy is a bonus for undecided tokens. The optimal logit is
(saved cost - price) / entropy_weight. So the entropy term makes logits a graded measure of a token's value: the tokens with the highest
logits are the best for any budget, not only for the trained ratio.

Letters for shapes: B texts, K masks of a text, T tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["advantages", "binary_entropy", "log_probability", "rate_terms", "reinforce"]


def binary_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each decision in nats, exactly: softplus(z) - z sigmoid(z)."""
    return functional.softplus(logits) - logits * torch.sigmoid(logits)


def log_probability(logits: Tensor, *, keep: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probability (B, K) of masks `keep` (B, K, T) under `logits` (B, T).

    Pads do not count.
    """
    signs = keep.to(logits.dtype) * 2 - 1
    return (functional.logsigmoid(signs * logits.unsqueeze(1)) * mask.unsqueeze(1)).sum(-1)


def advantages(rewards: Tensor) -> Tensor:
    """Return each reward (B, K) minus the mean of the text's other K - 1.

    This is the leave-one-out baseline, with K of 2 or more. Source: Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE
    Samples, Get a Baseline for Free!", eq. 8.
    """
    K = rewards.shape[1]
    return (rewards - rewards.mean(1, keepdim=True)) * (K / (K - 1))


def reinforce(logits: Tensor, *, keep: Tensor, distortion: Tensor, mask: Tensor) -> Tensor:
    """Return a term (B) whose gradient estimates that of a text's expected distortion per token.

    The reward is detached: no gradient flows into its computation.

    Args:
        logits: (B, T).
        keep: (B, K, T), the sampled masks.
        distortion: (B, K), nats per token of the text.
        mask: (B, T), True at tokens.
    """
    weights = advantages(-distortion.detach())
    return -(weights * log_probability(logits, keep=keep, mask=mask)).mean(1)


def rate_terms(logits: Tensor, *, mask: Tensor, price: Tensor, entropy_weight: float) -> Tensor:
    """Return price · E[tokens kept] − entropy_weight · entropy, summed by text (B).

    Both expectations are exact, not sampled.
    """
    terms = price * torch.sigmoid(logits) - entropy_weight * binary_entropy(logits)
    return (terms * mask).sum(1)
