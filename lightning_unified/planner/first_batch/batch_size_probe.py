"""Batch-size probe: run 1, 2, 4, … rows on the device to find how many fit.

A run uses it where a step cannot be traced.

Nothing of a probe stays: gradients, buffers, generators and all other state are put back after each run.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.errors import UndoError
from lightning_unified.nn.compiled import compiled_parts
from lightning_unified.planner.dry_run.compiled_parts import noticed
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.undone_run import Undone, gradient_of_step
from lightning_unified.step.split import BatchShape

__all__ = ["BatchSizeProbe", "ProbeResult", "probe_sizes"]

log = logging.getLogger("lightning_unified")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        micro_batch_size: The largest micro-batch size that fits.
        refused: The next larger size, which does not fit; None if the whole batch fits.
        tried: The sizes that ran, in order.
    """

    micro_batch_size: int
    refused: int | None
    tried: tuple[int, ...]


class BatchSizeProbe:
    """Runs 1, 2, 4, … units of rows forward and backward, until twice as many do not fit.

    A line through the last two peaks, with the bytes that the optimizer state will add, then gives the size that fits the budget.
    Everything a run changes is put back, as after the exactness check. Dropout is off meanwhile, so its masks are not counted.

    Where code is compiled, each size runs once before it is measured: compilation takes memory of its own. The first size is then two
    units, because a graph for a single row serves no other size.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy) -> None:
        self._trainer, self._policy = trainer, policy
        self._splitter = policy.batches.splitter("fit")
        self._compiles = bool(compiled_parts(trainer.lightning_module))

    def run(self, batch: Any, shape: BatchShape, *, step: Callable[[Any], ClosureResult]) -> ProbeResult | None:
        """Return the size that fits.

        The result is None if the device reports no peak, or fewer than two sizes ran.
        """
        room = self._policy.watch.room()
        points: list[tuple[int, int]] = []
        unit = self._policy.sizes.unit
        rows = max(2 * unit if self._compiles and shape.rows >= 4 * unit else unit, self._policy.sizes.least)
        budget = self._policy.watch.bytes if room is None else room
        while rows <= shape.rows:
            with noticed() as compiled:
                peak = self._peak(partial(step, self._splitter.split(batch, 0, rows, rows=shape.rows)))
            if compiled and not self._compiles:  # a function that no module holds: begin anew
                self._compiles = True
                return self.run(batch, shape, step=step)
            if peak is None:
                break
            points.append((rows, peak + self._missing_state()))
            if len(points) > 1 and _line(points, 2 * rows) > budget:
                break
            rows *= 2
        if len(points) < 2:
            return None
        failed = rows if points[-1][0] != rows and rows <= shape.rows else None
        return self._along_line(points, budget=budget, failed=failed, whole=shape.rows, unit=unit)

    def _along_line(
        self, points: list[tuple[int, int]], *, budget: int, failed: int | None, whole: int, unit: int
    ) -> ProbeResult:
        known = points[-1][0]
        largest = whole if failed is None else failed - unit
        rows = known
        while rows + unit <= largest and _line(points, rows + unit) <= budget:
            rows += unit
        tried = tuple(count for count, _ in points)
        return ProbeResult(micro_batch_size=rows, refused=None if rows >= whole else rows + unit, tried=tried)

    def _peak(self, step: Callable[[], ClosureResult]) -> int | None:
        """Return the peak of a run, in bytes; None if memory ran out, or no counter reports it."""
        watch = self._policy.watch

        def run() -> None:
            with Undone(self._trainer):
                gradient_of_step(self._trainer, step)

        if self._compiles and caught(run)[1] is not None:
            return None
        watch.release()
        watch.count_anew()
        _, reason = caught(run)
        peak = watch.measured_peak().bytes
        watch.release()
        return None if reason is not None else peak

    def _missing_state(self) -> int:
        """Return the bytes of optimizer state that the first step will add."""
        need = static_bytes(self._trainer.lightning_module, self._trainer.optimizers)["optimizer state"]
        there = static_bytes(self._trainer.lightning_module, [one for one in self._trainer.optimizers if one.state])
        return need - there["optimizer state"]


def _line(points: list[tuple[int, int]], rows: int) -> float:
    """Return the bytes for `rows` on the line through the last two points.

    The result is at least the last peak, because a process does not shrink.
    """
    (fewer, low), (more, high) = points[-2:]
    return high + max(high - low, 0) / (more - fewer) * (rows - more)


def probe_sizes(
    trainer: L.Trainer,
    *,
    policy: MemoryPolicy,
    batch: Any,
    shape: BatchShape | None,
    step: Callable[[Any], ClosureResult],
    why: str,
) -> str:
    """Probe for the micro-batch size that fits, set it, and return the outcome in words."""
    found = None
    if (
        shape is not None
        and not policy.splits.refuses(shape.rows)
        and policy.batches.splitter("fit").refusal(batch, shape.rows) is None
    ):
        try:
            found = BatchSizeProbe(trainer, policy).run(batch, shape, step=step)
        except UndoError:
            raise
        except Exception as error:  # the step may need the whole batch, which has not run yet
            why = f"{why}; and it did not run on fewer rows: {type(error).__name__}: {error}"
    if found is None:
        what_then = "sizes are found by trying"
    else:
        rows = ", ".join(map(str, found.tried))
        what_then = (
            f"{rows} rows were run on the device and undone: a micro-batch size of {found.micro_batch_size} fits"
        )
        if found.refused is not None and shape is not None:
            policy.sizes.plan(
                shape, micro_batch_size=found.micro_batch_size, refused=found.refused, room_bytes=policy.watch.room()
            )
    policy.events.append(f"the step could not be traced ({why}); {what_then}")
    log.warning("The step could not be traced (%s); %s.", why, what_then)
    return what_then
