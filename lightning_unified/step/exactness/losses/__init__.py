"""Loss rules: the candidate weights of micro-batches, and the shares they give."""

from lightning_unified.step.exactness.losses.candidates import (
    candidates,
    guesses,
    guesses_by_divisor,
    guesses_of_whole_losses,
    may_count,
)
from lightning_unified.step.exactness.losses.rules import LossRule, SummandRule, declared, likeliest, restored
from lightning_unified.step.exactness.losses.weighting import (
    Weighting,
    give_other_shares,
    needed_summands,
    require_counts,
    share_of,
    shares,
    shares_differ,
    with_losses,
)

__all__ = [
    "LossRule",
    "SummandRule",
    "Weighting",
    "candidates",
    "declared",
    "give_other_shares",
    "guesses",
    "guesses_by_divisor",
    "guesses_of_whole_losses",
    "likeliest",
    "may_count",
    "needed_summands",
    "require_counts",
    "restored",
    "share_of",
    "shares",
    "shares_differ",
    "with_losses",
]
