"""Summands of a loss, each a mean over terms of its own.

| module | subject |
|---|---|
| values | the scalars that a step computes |
| tree | the summands of a loss, read from autograd's graph |
| rest | what a loss has besides, where it is NaN |
| noting | all of these, for the steps of one module |
| scaling | a factor for the gradient of each summand |
| fitting | the loss rules of each summand, from gradients of whole and split rows |
| alike | names for summands of one kind, where rows lack some of them |
"""

from lightning_unified.step.exactness.losses.summands.alike import keys_by_terms, named_by_terms, possible_terms
from lightning_unified.step.exactness.losses.summands.fitting import (
    RunOfSummands,
    SummandFit,
    are_proportional,
    sums_up,
)
from lightning_unified.step.exactness.losses.summands.noting import StepSummands
from lightning_unified.step.exactness.losses.summands.scaling import scale_summands
from lightning_unified.step.exactness.losses.summands.tree import REST, Summand

__all__ = [
    "REST",
    "RunOfSummands",
    "StepSummands",
    "Summand",
    "SummandFit",
    "are_proportional",
    "keys_by_terms",
    "named_by_terms",
    "possible_terms",
    "scale_summands",
    "sums_up",
]
