"""One budget for everybody: of n tokens, exactly round(keep * n) stay, whatever gave them their scores."""

import numpy as np
import torch
from torch import Tensor

__all__ = ["check_keep", "kept_tokens", "top_k"]


def check_keep(keep: float) -> float:
    """Return `keep`.

    Raises:
        ValueError: If it is not a share of the tokens.
    """
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"keep={keep!r} is not a share of the tokens; give a number above 0, at most 1, as in 0.5.")
    return float(keep)


def kept_tokens(count: int, *, keep: float) -> int:
    """Return how many of `count` tokens stay: round(keep * count), halves to the even number."""
    return round(check_keep(keep) * count)


def top_k(scores: Tensor, *, mask: Tensor, keep: float, seed: int = 0) -> Tensor:
    """Return which tokens stay: in each row the `kept_tokens` of highest score.

    Equal scores are ordered by draws that depend on the seed and the position alone, so that a row's tokens are the same
    in any batch, and a method whose scores say little is not turned into a cut of the prefix.

    Shapes:
        `scores` (B, T) float, on any device; `mask` (B, T) bool, False at pads, which are never kept -> (B, T) bool, where `mask` is.

    Raises:
        ValueError: If a token's score is NaN, or `keep` is not a share.
    """
    # ordered on the host: float64 and stable sorts are not to be had on every device
    real, values = mask.cpu(), scores.detach().cpu().double()
    if bool(torch.isnan(values[real]).any()):
        raise ValueError("a token's score is NaN; a budget needs scores that can be ordered.")
    counts = [kept_tokens(int(count), keep=keep) for count in real.sum(1).tolist()]
    order = torch.from_numpy(np.random.default_rng(seed).random(scores.shape[1])).argsort().expand(scores.shape)
    for key in (values, real.double()):  # the last decides first: pads come behind every token
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    chosen = torch.arange(scores.shape[1]) < torch.tensor(counts)[:, None]
    return torch.zeros_like(real).scatter(1, order, chosen).to(mask.device)
