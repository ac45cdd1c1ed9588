"""How much each micro-batch counts in its batch, and what their losses and figures come to together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.training.split import merge

__all__ = ["Weighting"]


class Weighting:
    """The share of each micro-batch in its batch, by the loss's own number of terms.

    If the loss is a mean over terms (samples, tokens), the batch's loss and gradient are those of the micro-batches averaged
    by their numbers of terms. A module with `loss_is_sum` divides by the whole batch's totals itself, so its losses add.
    A batch without any loss term is weighted by rows: whatever the module makes of it, 0 or NaN, the whole batch's is the same.

    Args:
        rules: Their `loss_is_sum` and `loss_weight` say how the loss is made; None counts rows.
        parts: The micro-batches.
        sizes: Rows of each.
        count: Counts the loss terms of a micro-batch of a module that does not declare it; None counts rows.
        zero_by_rows: Whether a batch without any loss term is weighted by rows.
        adds: Whether the parts' figures add up to the whole's; None as `loss_is_sum` says. In an evaluation they do not.

    Raises:
        SplitError: If `loss_weight` gave a negative or no number.
    """

    def __init__(
        self,
        rules: MicroBatchRules | None,
        parts: Sequence[Any],
        sizes: Sequence[int],
        *,
        count: Callable[[Any], Any] | None = None,
        adds: bool | None = None,
        zero_by_rows: bool = True,
    ) -> None:
        self._sizes = sizes
        rules = rules or MicroBatchRules()
        self._adds = rules.loss_is_sum if adds is None else adds
        weigh = rules.loss_weight or count
        counted = list(sizes) if weigh is None or self._adds else _on_host([weigh(part) for part in parts])
        if not all(weight >= 0 for weight in counted):
            raise SplitError(f"loss_weight returned {counted}: it must return the number of loss terms, 0 or more.")
        self._weights = counted if sum(counted) or not zero_by_rows else list(sizes)

    @property
    def terms(self) -> float:
        """The loss terms of the whole batch; its rows where nothing else is known."""
        return sum(self._weights)

    def share(self, index: int) -> float | None:
        """Return a micro-batch's share of the batch, 0 to 1; None if its loss is its share already."""
        return None if self._adds else self._weights[index] / sum(self._weights)

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the whole batch's result: the losses' shares added, extras merged.

        Raises:
            SplitError: If some micro-batches with loss terms gave no loss.
        """
        losses = [(output.loss, self.share(index)) for index, output in enumerate(outputs) if output.loss is not None]
        if losses and len(losses) != sum(1 for weight in self._weights if weight):
            raise SplitError(
                "training_step returned None for some micro-batches of a batch and a loss for others, so the batch was not cut exactly; "
                'let it return a loss for every part, or leave micro_batch_size="auto" and raise the budget so that batches run whole.'
            )
        shares = [loss if share is None else loss * share for loss, share in losses]
        extra = merge([output.extra for output in outputs], sizes=self._sizes, average=self.average)
        return ClosureResult(torch.stack(shares).sum() if shares else None, extra=extra)

    def average(self, values: Sequence[Any], parts: Sequence[int] | None = None) -> Any:
        """Average one figure a micro-batch by loss weight; add them if the module's loss adds.

        Args:
            values: The figures.
            parts: The micro-batches they are of; default all, in order.
        """
        weights = self._weights if parts is None else [self._weights[part] for part in parts]
        pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        if not pairs:
            return values[-1]
        if self._adds:
            return sum(value for value, _ in pairs)
        return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _on_host(weights: list[Any]) -> list[float]:
    """Return plain numbers; weights given as tensors of a device are read in one transfer."""
    tensors = [weight.reshape(()) for weight in weights if isinstance(weight, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else ())
    return [float(next(read) if isinstance(weight, Tensor) else weight) for weight in weights]
