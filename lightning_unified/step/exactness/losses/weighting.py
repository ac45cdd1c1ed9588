"""Shares: the factors of micro-batches' losses that a loss rule gives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses.rules import LossRule
from lightning_unified.step.results.merging import MicroBatchWeights

__all__ = ["Weighting", "require_counts", "shares", "shares_differ"]

_ROUNDING = 1e-9  # largest difference of two equal shares


def require_counts(rule: LossRule, counted: Sequence[float]) -> None:
    """Raise `SplitError` if a rule's counts are no valid numbers of loss terms."""
    if not all(count >= 0 for count in counted):
        raise SplitError(f"{rule.name} gave {list(counted)}: it must give the number of loss terms, 0 or more.")


def shares(rule: LossRule, micro_batches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return the factor of each micro-batch's loss; rows decide if no micro-batch has a term."""
    if rule.adds:
        return [1.0] * len(micro_batches)
    counted = (
        [float(size) for size in sizes] if rule.count is None else [float(rule.count(one)) for one in micro_batches]
    )
    if not sum(counted):
        counted = [float(size) for size in sizes]
    return [count / sum(counted) for count in counted]


def shares_differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two rules give micro-batches different shares."""
    return len(one) != len(other) or any(abs(a - b) > _ROUNDING for a, b in zip(one, other, strict=True))


class Weighting:
    """The share of each micro-batch in its batch.

    Many losses are means over terms (samples, tokens). The batch's loss is then the mean of the micro-batches' losses, weighted by their
    numbers of terms. The same holds for the gradient. Losses that are sums add up. Rows weight a batch without any loss term: each micro-batch then
    has the loss of the whole batch, 0 or NaN.

    Args:
        rule: The loss rule that weights micro-batches.
        batches: The micro-batches.
        rows: The number of rows of each micro-batch.
        zero_by_rows: Whether a batch without any loss term is weighted by rows.

    Raises:
        SplitError: If the rule counts a negative number of terms, or NaN.
    """

    def __init__(
        self, rule: LossRule, batches: Sequence[Any], rows: Sequence[int], *, zero_by_rows: bool = True
    ) -> None:
        self._adds, self._rule = rule.adds, rule
        counted = list(map(float, rows))
        if rule.count is not None and not rule.adds:
            counted = _on_host([rule.count(batch) for batch in batches])
        require_counts(rule, counted)
        self._counted = counted
        terms = counted if sum(counted) or not zero_by_rows else list(map(float, rows))
        self.weights = MicroBatchWeights(list(rows), terms)

    @property
    def terms(self) -> float:
        """The number of loss terms of the whole batch; its rows if terms are not counted."""
        return sum(self.weights.terms)

    def share(self, index: int) -> float | None:
        """Return a micro-batch's share of the batch, 0 to 1; None if losses add up without weights."""
        return None if self._adds else self.weights.terms[index] / sum(self.weights.terms)

    @property
    def shares(self) -> list[float]:
        """The factor of each micro-batch's loss."""
        found = [self.share(index) for index in range(len(self.weights.terms))]
        return [1.0 if share is None else share for share in found]

    def has_loss_of_nothing(self, index: int, loss: Tensor) -> bool:
        """Return whether a micro-batch without a loss term has a loss all the same.

        An example is a sum divided by `max(terms, 1)`. A loss that is not finite is a mean of no terms. A declared `loss_weight` of 0 leaves
        out any loss.
        """
        is_counted = self._counted[index] or not self._rule.reads_a_field
        return not is_counted and bool(loss.detach().isfinite() and loss.detach() != 0)

    def loss(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """Return the whole batch's loss: the weighted sum of losses; None without losses.

        Raises:
            SplitError: If some micro-batches with loss terms gave no loss.
        """
        given = [(loss, self.share(index)) for index, loss in enumerate(losses) if loss is not None]
        if given and len(given) != sum(1 for weight in self.weights.terms if weight):
            raise SplitError(
                "training_step returned None for some micro-batches of a batch and a loss for others, so the batch was not split exactly; "
                'let it return a loss for every micro-batch, or leave micro_batch_size="auto" and raise the budget so that batches run whole.'
            )
        shares = [loss if share is None else loss * share for loss, share in given]
        return torch.stack(shares).sum(0) if shares else None


def _on_host(weights: list[Any]) -> list[float]:
    """Return weights as plain numbers; all tensors are copied from the device in one transfer."""
    tensors = [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]
    read = iter(torch.stack([one.to(tensors[0].dtype) for one in tensors]).tolist() if tensors else ())
    return [float(next(read) if isinstance(weight, Tensor) else weight) for weight in weights]
