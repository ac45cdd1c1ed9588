"""What rows need where a step cannot be traced: a few of them run on the device, then twice as many, and nothing of it stays."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.undone_run import Undone, gradient_of_step
from lightning_unified.step.split import BatchShape

__all__ = ["BatchSizeProbe", "Found", "tried"]

log = logging.getLogger("lightning_unified")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a probe came to.

    Attributes:
        rows: That fit at once.
        refused: More rows, that do not; None if the whole batch fits.
        tried: Rows that ran, in order.
    """

    rows: int
    refused: int | None
    tried: tuple[int, ...]


class BatchSizeProbe:
    """Runs forward and backward passes of 1, 2, 4, … units of rows, until twice as many would not fit, and draws a line through the last two.

    The line is drawn to the budget, with what the optimizer's state will add. Everything a run changes is put back, as after the
    splittability check; dropout is off meanwhile, whose masks are not counted.

    Args:
        trainer: In `fit`.
        policy: Whose budget it is.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy) -> None:
        self._trainer, self._policy = trainer, policy
        self._splitter = policy.batches.splitter("fit")

    def run(self, batch: Any, shape: BatchShape, *, step: Callable[[Any], ClosureResult]) -> Found | None:
        """Return what fits; None where the device tells no peak, or not even the smallest unit ran.

        Args:
            batch: Whole.
            shape: Of it.
            step: Runs `training_step` on a batch.
        """
        room = self._policy.watch.room()
        points: list[tuple[int, int]] = []
        rows, unit = max(self._policy.sizes.unit, self._policy.sizes.least), self._policy.sizes.unit
        budget = self._policy.watch.bytes if room is None else room
        while rows <= shape.rows:
            peak = self._peak(partial(step, self._splitter.split(batch, 0, rows, rows=shape.rows)))
            if peak is None:
                break
            points.append((rows, peak + self._to_come()))
            if len(points) > 1 and _line(points, 2 * rows) > budget:
                break
            rows *= 2
        if len(points) < 2:
            return None
        failed = rows if points[-1][0] != rows and rows <= shape.rows else None
        return self._drawn(points, budget=budget, failed=failed, most=shape.rows, unit=unit)

    def _drawn(self, points: list[tuple[int, int]], *, budget: int, failed: int | None, most: int, unit: int) -> Found:
        known = points[-1][0]
        largest = most if failed is None else failed - unit
        rows = known
        while rows + unit <= largest and _line(points, rows + unit) <= budget:
            rows += unit
        tried = tuple(count for count, _ in points)
        return Found(rows=rows, refused=None if rows >= most else rows + unit, tried=tried)

    def _peak(self, step: Callable[[], ClosureResult]) -> int | None:
        """Return the peak of a run, in bytes; None if memory ran out, or nobody knows."""
        watch = self._policy.watch
        watch.release()
        watch.count_anew()

        def run() -> None:
            with Undone(self._trainer):
                gradient_of_step(self._trainer, step)

        _, reason = caught(run)
        peak = watch.measured_peak().bytes
        watch.release()
        return None if reason is not None else peak

    def _to_come(self) -> int:
        """Return the bytes that the optimizer's first step will add."""
        need = static_bytes(self._trainer.lightning_module, self._trainer.optimizers)["optimizer state"]
        there = static_bytes(self._trainer.lightning_module, [one for one in self._trainer.optimizers if one.state])
        return need - there["optimizer state"]


def _line(points: list[tuple[int, int]], rows: int) -> float:
    """Return what `rows` need, on the line through the last two points; no less than the last, for a process does not shrink."""
    (fewer, low), (more, high) = points[-2:]
    return high + max(high - low, 0) / (more - fewer) * (rows - more)


def tried(
    trainer: L.Trainer,
    *,
    policy: MemoryPolicy,
    batch: Any,
    shape: BatchShape | None,
    step: Callable[[Any], ClosureResult],
    why: str,
) -> str:
    """Find on the device what fits, where it cannot be told without; set sizes so, and return it in words.

    Args:
        trainer: In `fit`.
        policy: Whose sizes are set.
        batch: Whole.
        shape: Of it; None for one that has no rows to count.
        step: Runs `training_step` on a batch.
        why: It cannot be told, in words.
    """
    found = None
    if (
        shape is not None
        and not policy.splits.refuses(shape.rows)
        and policy.batches.splitter("fit").refusal(batch, shape.rows) is None
    ):
        try:
            found = BatchSizeProbe(trainer, policy).run(batch, shape, step=step)
        except Exception as error:  # a step may not run on fewer rows, and the whole batch has not been tried yet
            why = f"{why}; nor tried on fewer rows: {type(error).__name__}: {error}"
    if found is None:
        what_then = "sizes are found by trying"
    else:
        rows = ", ".join(map(str, found.tried))
        what_then = f"{rows} rows were run on the device and undone: {found.rows} at once fit"
        if found.refused is not None and shape is not None:
            policy.sizes.plan(shape, rows=found.rows, refused=found.refused, room_bytes=policy.watch.room())
    policy.events.append(f"the step could not be traced ({why}); {what_then}")
    log.warning("The step could not be traced (%s); %s.", why, what_then)
    return what_then
