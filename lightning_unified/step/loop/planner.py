"""The interface through which the step asks for a plan; the planner implements it."""

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.step.split import BatchShape

__all__ = ["StepPlanner"]


class StepPlanner(Protocol):
    """Plans for a batch before it runs.

    The step declares the interface, because `step` must not import `planner`.
    """

    def look(self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult]) -> None:
        """Plan for `batch` if its kind is new; `step` runs `training_step` on a batch."""

    def look_at_validation(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan for a validation batch within the fit if its kind is new."""

    def fits(self, rows: int) -> bool | None:
        """Return whether `rows` rows of the batch are predicted to fit; None without a prediction."""

    def note_check(self) -> None:
        """Note that an exactness check runs, whose memory is no step's."""

    def batch_done(self) -> None:
        """Learn from a batch that has run."""
