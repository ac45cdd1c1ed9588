"""Choose how many rows of a batch an evaluation check runs, and compare them.

A check first runs a few units of rows. A step may compute with a fixed number of rows (`z[:8]`, `losses.topk(10)`), which only a run of more
rows shows. So some checks also run the whole batch and its own micro-batches, or as many rows as fit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.rows import splits_of
from lightning_unified.step.exactness.trials.evaluation_runs import EvaluationRuns, EvaluationTrial
from lightning_unified.step.recovery.measured_room import MeasuredRoom
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.split import split_rows

__all__ = ["EvaluationSizes"]

_UNITS = 8  # units of rows in a check; judgement: enough for three unequal micro-batches
_FEWEST = 3  # units that a check runs where they fit: two equal micro-batches do not distinguish weighted means


class EvaluationSizes:
    """Compares as many rows of a batch as a check asks for, and fewer where memory runs out.

    Args:
        runs: Runs the step on some rows.
        room: Tells whether more rows fit.
        group: The processes that run each check.

    Attributes:
        compared: The rows of the largest comparison so far.
    """

    def __init__(self, runs: EvaluationRuns, room: MeasuredRoom, group: CheckGroup) -> None:
        self._runs, self._room, self._group = runs, room, group
        self._failed: int | None = None  # the fewest rows for which memory ran out in `more`
        self.compared = 0

    def few(self, step: Callable[[Any], Any], asked: Request, learn: Callable[[EvaluationTrial], None]) -> int:
        """Compare a few units of rows.

        Args:
            step: Runs the stage's step on a batch.
            asked: The batch.
            learn: Is called with each trial.

        Returns:
            The number of units; 0 if memory ran out.
        """
        fewest = _FEWEST if asked.least == 1 else 3 * asked.least + 1
        units = min(max(asked.micro_batch_size // asked.unit, fewest), _UNITS, asked.rows // asked.unit)
        while units >= 2 and not self._has_run(step, asked, learn, units):
            units = max(units // 2, _FEWEST) if units > _FEWEST else units - 1
        return units if units >= 2 else 0

    def more(
        self, step: Callable[[Any], Any], asked: Request, learn: Callable[[EvaluationTrial], None], *, done: int
    ) -> int:
        """Compare all rows, or as many as fit, if these are more than `done` units; return the number of units.

        Where nothing stops a process that takes too much memory, the rows grow by doubling, from those of a micro-batch: each run tells
        whether the next one fits. The other arguments are those of `few`.
        """
        has_run, unit = partial(self._has_run, step, asked, learn), asked.unit
        most = self._not_failed(asked)
        if most <= done:
            return done
        if self._group.fits(lambda _: self._room.is_ample(asked.batch))(asked.rows):
            while most > done and not has_run(most):
                self._failed, most = most * unit, most // 2
            return max(most, done)
        fits, size = self._group.fits(self._room.fits), max(done, min(max(asked.micro_batches) // unit, most))
        while True:
            with self._room.measuring(size * unit):
                is_done = not has_run(size) or size == most
            if is_done or not fits(min(2 * size, most) * unit):
                return size
            size = min(2 * size, most)

    def _not_failed(self, asked: Request) -> int:
        """Return the units of the batch, or half of them and so on where so many are known to fail."""
        units, failed = asked.rows // asked.unit, [one for one in (asked.failed, self._failed) if one is not None]
        while failed and units * asked.unit >= min(failed):
            units //= 2
        return units

    def _has_run(
        self, step: Callable[[Any], Any], asked: Request, learn: Callable[[EvaluationTrial], None], units: int
    ) -> bool:
        """Compare some units of a batch; return False if memory runs out."""
        size = units * asked.unit
        if caught(partial(self._compare, step, asked, learn, size))[1] is not None:
            self._room.release()
            return False
        self.compared = max(self.compared, size)
        return True

    def _compare(
        self, step: Callable[[Any], Any], asked: Request, learn: Callable[[EvaluationTrial], None], size: int
    ) -> None:
        splits = _splits(asked, size)
        with self._group.trial():
            for trial in self._runs.trials(
                step, asked.batch, rows=asked.rows, size=size, unit=asked.unit, splits=splits
            ):
                learn(trial)


def _splits(asked: Request, size: int) -> Sequence[Sequence[int]]:
    """Return the splits of `size` rows of a batch: as in the batch, and two of their own if they are few."""
    unit, most = asked.unit, max(asked.micro_batches, default=0)
    if most and size == asked.rows > _UNITS * unit:
        return [asked.micro_batches]
    if most and size > max(most, _UNITS * unit):
        return [split_rows(size, micro_batch_size=most, unit=unit)]
    splits = [[unit * one for one in units] for units in splits_of(size // unit, least=asked.least)]
    own = list(asked.micro_batches)
    return [*splits, own] if own and size == asked.rows and own not in splits else splits
