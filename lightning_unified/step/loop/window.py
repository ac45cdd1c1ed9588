"""Accumulation windows with a gradient that is the mean over all their loss terms."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError

__all__ = ["WindowTerms"]


class WindowTerms:
    """The numbers of loss terms in the batches of the window so far.

    Lightning divides every batch's loss by `accumulate_grad_batches`. So a batch with few scored tokens counts as much
    as one with many. The last window of an epoch may be shorter, and is divided by too much (Lightning issues 19987,
    20350). Here each batch's gradient counts by its terms, in units of the first batch's terms, so that scaled losses
    stay in their range. The window's sum is divided once by all its terms, before anything clips or writes.

    Attributes:
        unit: The terms in whose units batches count, if ranks have agreed on that number; None for those of the first batch.
    """

    def __init__(self) -> None:
        self._before: list[float] = []
        self._now, self._counted_by = 0.0, ""
        self.unit: float | None = None

    def begin(self, terms: float, *, opens: bool, counted_by: str = "") -> None:
        """Begin a batch, or begin it again.

        Args:
            terms: The number of its loss terms.
            opens: Whether it opens its window.
            counted_by: The name of the rule that counts them; empty where unknown.

        Raises:
            SplitError: If another rule counted the window's earlier batches.
        """
        if opens:
            self._before, self.unit = [], None
        if any(self._before) and self._counted_by and counted_by != self._counted_by:
            raise SplitError(
                f'window_mean="terms": the loss terms of a window\'s first batches were counted by {self._counted_by}, and the exactness check has found '
                f"since that {counted_by} is their number. Declare MicroBatchRules(loss_weight=…), the number of terms that the loss is a mean over."
            )
        self._now, self._counted_by = terms, counted_by

    def done(self) -> None:
        """Record that the batch is in the window's gradient."""
        self._before.append(self._now)

    @property
    def is_new(self) -> bool:
        """Whether the batch is the first of its window."""
        return not self._before

    @property
    def factor(self) -> float:
        """The factor of the batch's mean loss before backward; 0 for a batch without a loss term."""
        return self._now / self._unit

    def share(self, share: float | None, *, nominal: int) -> float:
        """Return the factor of a micro-batch's loss in the window's gradient.

        Args:
            share: The share of its loss in the batch's; None for a whole batch.
            nominal: The number of batches in a window, by which Lightning has divided the loss.
        """
        return (1.0 if share is None else share) * self.factor * nominal

    @property
    def terms(self) -> float:
        """The loss terms in the window so far, including this batch's."""
        return sum(self._before) + self._now

    def divide(self, parameters: Iterable[Tensor], *, total: float | None = None) -> None:
        """Divide the summed gradients into the window's mean, once, after its last backward pass.

        The mean is over `total` terms, by default the window's own.
        """
        total = self.terms if total is None else total
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if total and total != self._unit and gradients:
            with torch.no_grad():
                torch._foreach_mul_(gradients, self._unit / total)  # pyright: ignore[reportPrivateImportUsage]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that stops within a window."""
        return {"terms": list(self._before), "unit": self.unit, "counted_by": self._counted_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        self._before, self.unit, self._counted_by = list(state["terms"]), state["unit"], state.get("counted_by", "")

    @property
    def _unit(self) -> float:
        if self.unit is not None:
            return self.unit
        return next((terms for terms in (*self._before, self._now) if terms), 1.0)
