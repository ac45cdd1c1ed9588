"""Weights of a cross-entropy over labels that a step assigns.

A detector matches queries to the objects of each image. The label of any other query is "no object", the one class with a lower weight. Such a
loss is divided by the sum of the labels' weights:

    objects * weight + (queries * rows - objects) * background

Neither the labels nor the number of queries are in the batch. The objects are, as entries of different lengths, and the class weights are in
autograd's graph. So the divisors of three micro-batches tell the number of queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import numpy as np

from lightning_unified.step.exactness.facts.fields import lengths_at
from lightning_unified.step.exactness.facts.terms import Terms
from lightning_unified.step.exactness.losses.rules import LossRule

__all__ = ["AssignedLabels", "background_of"]

_LEAST = 3  # micro-batches: two of them have a number of queries for any objects
_ROUNDING = 1e-4  # relative, of a divisor in float32
_WHOLE = 0.02  # judgement: the fit of 900 labels in a row in float32 is off by a tenth of it


def background_of(weights: Sequence[float]) -> tuple[float, float] | None:
    """Return the weight of all classes but one, and the lower one of that class.

    The result is None where no single class has a lower weight than all others, which have the same.
    """
    found = sorted(weights)
    return (found[1], found[0]) if len(found) > 1 and 0 < found[0] < found[1] == found[-1] else None


@dataclass(frozen=True, slots=True)
class AssignedLabels:
    """Counts the objects that get a label of their own, until the number of a row's labels is known.

    Args:
        path: The path of the field whose rows have an entry for each object.
        weight: The weight of an object's label.
        background: The weight of any other label.
    """

    path: str
    weight: float
    background: float

    def __call__(self, micro_batch: Any) -> float:
        """Return the number of objects."""
        return float(sum(lengths_at(micro_batch, self.path)))

    def rule(self, divisors: Sequence[float | None], batches: Sequence[Any], sizes: Sequence[int]) -> LossRule | None:
        """Return the rule with the number of labels in a row; None where these micro-batches do not tell it.

        Args:
            divisors: What divides the loss of each micro-batch, up to a constant factor; None where unknown.
            batches: The micro-batches.
            sizes: The rows of each.
        """
        known = [one for one in divisors if one is not None and isfinite(one)]
        if len(known) < max(_LEAST, len(divisors)):
            return None
        counts = np.array([[self(batch), size] for batch, size in zip(batches, sizes, strict=True)])
        (of_objects, of_rows), _, rank, _ = np.linalg.lstsq(counts, np.array(known), rcond=None)
        if rank < counts.shape[1] or of_rows <= 0 or of_objects <= _ROUNDING * of_rows:
            return None
        in_a_row = of_rows / of_objects * (self.weight - self.background) / self.background
        labels = round(in_a_row)
        most = max(length for batch in batches for length in lengths_at(batch, self.path))
        fits = np.allclose(counts @ (of_objects, of_rows), known, rtol=_ROUNDING, atol=0)
        if not (fits and labels >= most and isclose(in_a_row, labels, rel_tol=0, abs_tol=_WHOLE)):
            return None
        others = labels * self.background / (self.weight - self.background)
        name = f"{labels} labels in each row, assigned to {self.path!r}"
        return LossRule(name, Terms(self.path, kind="lengths", others=others), is_guess=True, is_by_divisor=True)
