"""How much each micro-batch counts in its batch: the shares of their losses, by the loss's own number of terms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses import LossRule, require_counts
from lightning_unified.step.results.merging import Parts

__all__ = ["Weighting"]


class Weighting:
    """The share of each micro-batch in its batch.

    If the loss is a mean over terms (samples, tokens), the batch's loss and gradient are those of the micro-batches averaged by their
    numbers of terms. Losses that are sums add up. A batch without any loss term is weighted by rows: whatever the module makes of it, 0 or
    NaN, the whole batch's is the same.

    Args:
        rule: By what micro-batches are weighted.
        batches: The micro-batches.
        rows: Of each.
        zero_by_rows: Whether a batch without any loss term is weighted by rows.

    Raises:
        SplitError: If the rule's count gave a negative or no number.
    """

    def __init__(
        self, rule: LossRule, batches: Sequence[Any], rows: Sequence[int], *, zero_by_rows: bool = True
    ) -> None:
        self._adds = rule.adds
        counted = list(map(float, rows))
        if rule.count is not None and not rule.adds:
            counted = _on_host([rule.count(batch) for batch in batches])
        require_counts(rule, counted)
        weights = counted if sum(counted) or not zero_by_rows else list(map(float, rows))
        self.parts = Parts(list(rows), weights)

    @property
    def terms(self) -> float:
        """The loss terms of the whole batch; its rows where nothing else is known."""
        return sum(self.parts.terms)

    def share(self, index: int) -> float | None:
        """Return a micro-batch's share of the batch, 0 to 1; None if its loss is its share already."""
        return None if self._adds else self.parts.terms[index] / sum(self.parts.terms)

    def loss(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """Return the whole batch's loss: the shares of the micro-batches' losses, added; None if none gave one.

        Raises:
            SplitError: If some micro-batches with loss terms gave no loss.
        """
        given = [(loss, self.share(index)) for index, loss in enumerate(losses) if loss is not None]
        if given and len(given) != sum(1 for weight in self.parts.terms if weight):
            raise SplitError(
                "training_step returned None for some micro-batches of a batch and a loss for others, so the batch was not split exactly; "
                'let it return a loss for every micro-batch, or leave micro_batch_size="auto" and raise the budget so that batches run whole.'
            )
        shares = [loss if share is None else loss * share for loss, share in given]
        return torch.stack(shares).sum() if shares else None


def _on_host(weights: list[Any]) -> list[float]:
    """Return plain numbers; weights given as tensors of a device are read in one transfer."""
    tensors = [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]
    read = iter(torch.stack([one.to(tensors[0].dtype) for one in tensors]).tolist() if tensors else ())
    return [float(next(read) if isinstance(weight, Tensor) else weight) for weight in weights]
