"""What a trial found."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_unified.step.exactness.losses import LossRule

__all__ = ["Findings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The findings of one trial.

    Args:
        agreeing: The loss rules under which the gradients agree, in the order of the candidates.
        rejected: The names of the loss rules under which the gradients differ.
        rows: The number of rows that ran.
        first: The first of these rows.
        difference: The relative difference of the gradients under the first rule.
        noise: A note on random draws; empty if there is none.
        is_thin: Whether a single micro-batch had a gradient other than zero. Losses divided by a count of the batch, such as of its
            positives, then look like sums.
        is_proportional: Whether gradients, and what the backward pass writes and logs, are proportional to the loss.
    """

    agreeing: Sequence[LossRule]
    rejected: set[str]
    rows: int
    difference: float
    noise: str
    is_thin: bool = False
    is_proportional: bool = True
    first: int = 0

    @classmethod
    def of_losses(cls, agreeing: Sequence[LossRule]) -> "Findings":
        """Return the findings of a comparison of losses alone: the rules under which they agree."""
        return cls(agreeing=agreeing, rejected=set(), rows=0, difference=0.0, noise="")

    def joined(self, other: "Findings") -> "Findings":
        """Return these findings combined with those of a later trial of the agreeing rules."""
        names = {rule.name for rule in self.agreeing}
        return replace(
            self,
            agreeing=[rule for rule in other.agreeing if rule.name in names] or other.agreeing,
            rejected=self.rejected | other.rejected,
            difference=max(self.difference, other.difference),
            noise=other.noise or self.noise,
            is_thin=self.is_thin and other.is_thin,
            is_proportional=self.is_proportional and other.is_proportional,
        )
