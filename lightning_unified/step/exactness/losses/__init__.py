"""Loss rules: the candidate weights of micro-batches, and the shares they give."""

from lightning_unified.step.exactness.losses.candidates import candidates, guesses, may_count
from lightning_unified.step.exactness.losses.rules import LossRule, declared, likeliest, restored
from lightning_unified.step.exactness.losses.weighting import Weighting, require_counts, shares, shares_differ

__all__ = [
    "LossRule",
    "Weighting",
    "candidates",
    "declared",
    "guesses",
    "likeliest",
    "may_count",
    "require_counts",
    "restored",
    "shares",
    "shares_differ",
]
