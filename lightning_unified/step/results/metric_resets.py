"""Notice when a step empties a torchmetrics object itself.

A split batch starts each metric empty, and joins what the micro-batches leave with the state from before. A step that calls `reset`, such
as `if batch_idx % 50 == 0: self.accuracy.reset()`, has dropped that state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchmetrics import Metric

from lightning_unified.errors import SplitError

__all__ = ["ResetRecord", "refusal_of_reset"]


class ResetRecord:
    """Records which metrics a step empties by `reset`.

    A metric's own `forward` empties it too, and is left out.
    """

    def __init__(self) -> None:
        self._emptied: set[int] = set()
        self._paused = 0

    def has(self, metric: Metric) -> bool:
        """Return whether `metric` was emptied inside the block of `watching`."""
        return id(metric) in self._emptied

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the resets inside the block."""
        reset, forward = Metric.reset, Metric.forward

        def noting(metric: Metric) -> None:
            if not self._paused:
                self._emptied.add(id(metric))
            reset(metric)

        def nested(metric: Metric, *args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return forward(metric, *args, **kwargs)

        # methods of the class: a step may copy a metric, and the copy would keep a method of its object
        owner: Any = Metric
        owner.reset, owner.forward = noting, nested
        try:
            yield
        finally:
            owner.reset, owner.forward = reset, forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no reset inside the block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


def refusal_of_reset(path: str) -> SplitError:
    """Return the error for a metric that only some micro-batches of a batch reset."""
    return SplitError(
        f"the step resets the metric {path} in some micro-batches of a batch and not in others; reset it in on_train_batch_end or "
        "on_validation_batch_end, or declare MicroBatchRules(splittable=False)."
    )
