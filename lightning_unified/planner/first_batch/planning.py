"""Plan the step of one batch in three steps: gather inputs, decide, apply."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import lightning as L

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.cost_model.search import Candidate
from lightning_unified.cost_model.trace.interpolation import MisalignedError
from lightning_unified.errors import BudgetError, UndoError
from lightning_unified.planner.first_batch.decide import (
    StepInputs,
    StepPlan,
    decide,
    more_rows,
    trusted,
)
from lightning_unified.planner.first_batch.gather import RunSpeeds, gather_inputs, open_combinations, planner_of
from lightning_unified.planner.first_batch.lengths import ROOM, LongerLengths, PlannedLengths, is_padded
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_duration

__all__ = ["Decision", "StepPlanning", "set_memory_options"]

log = logging.getLogger("lightning_unified")

_SHORTER = (
    4  # judgement: lengths below the longest that get a plan; each takes a second or two, and data has few or countless
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A plan with its inputs and the planner that predicts it.

    Attributes:
        planner: The planner of the batch.
        inputs: The inputs of the decision.
        plan: The plan that follows from them.
    """

    planner: Planner
    inputs: StepInputs
    plan: StepPlan

    @property
    def prediction(self) -> Prediction:
        """The prediction for the step as planned."""
        candidate = self.plan.candidate
        if candidate is None:
            return self.inputs.own.within(self.inputs.budget_bytes)
        return self.planner.prediction_of(candidate)


class StepPlanning:
    """Plans batches of a fit one at a time, and applies each plan to the policy.

    Attributes:
        prediction: The prediction for the step as it is set to run; None without a plan.
        reason: How the plan came about, in words.
        alternatives: The other results of the last search.
        shorter: Predictions for shorter rows, by the elements of a row; None where there is none.
        calibration: Corrections from earlier runs; None before the first plan.
        speeds: The speeds of the machine; None before the first plan.
        kind: The name under which measurements correct predictions of this kind.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, budget: StepBudget, *, precision: str) -> None:
        self._trainer, self._policy, self._budget, self._precision = trainer, policy, budget, precision
        self._combination: Combination | None = None
        self._begun, self._room = 0.0, 0.0
        self._lengths: PlannedLengths | LongerLengths | None = None
        self._unlike: set[tuple[Combination, bool]] = (
            set()
        )  # memory options under which lengths have no common form, and whether batches are split
        self.prediction: Prediction | None = None
        self.reason = "no batch has run yet"
        self.alternatives: tuple[Candidate, ...] = ()
        self.shorter: dict[int, Prediction | None] = {}
        self.calibration: Calibration | None = None
        self.speeds: RunSpeeds | None = None
        self.kind = ""

    def plan_beside_kept(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan with room for the memory that the module keeps, and a tenth more.

        If nothing fits beside it, plan without that room.
        """
        kept = self._policy.kept
        self._budget.kept_bytes = kept.bytes + kept.bytes // 10
        kept.give_back()
        try:
            self.plan(batch, shape)
        except BudgetError:
            if not self._budget.kept_bytes:
                raise
            self._budget.kept_bytes = 0
            self.plan(batch, shape)

    def plan(self, batch: Any, shape: BatchShape | None) -> None:
        """Gather the inputs for a batch, decide, and apply the plan.

        Raises:
            BudgetError: If no plan fits.
            DryRunError: If the step cannot be traced, or the trace cannot be trusted.
        """
        self._begun = time.monotonic()
        self._budget.note_foreign(batch)
        self._room = ROOM if shape is not None and is_padded(batch, shape.rows) else 0.0
        self.calibration = Calibration.of(self._policy.watch.reading())
        self.speeds = RunSpeeds(self._policy.watch, self.calibration, precision=self._precision)
        planner, combinations = self._planner(batch, shape), self.combinations()
        own = trusted(planner.predict(combinations[0], micro_batch_size=self._policy.sizes.max_micro_batch_size))
        decision = self._decided(planner, combinations, own, shape)
        if self._budget.planning_took_memory(batch) and not planner.fits(
            decision.plan.combination, micro_batch_size=decision.plan.micro_batch_size, limit=self._budget.left
        ):
            decision = self._decided(planner, combinations, own, shape)
        self.apply(decision, shape)

    def combinations(self) -> list[Combination]:
        """Return the combinations of memory options to compare, the user's own first."""
        return open_combinations(self._trainer, self._policy, precision=self._precision)

    def apply(self, decision: Decision, shape: BatchShape | None) -> None:
        """Set memory options and the micro-batch size as planned, and keep the prediction."""
        plan, prediction = decision.plan, decision.prediction
        prediction = replace(prediction, planning_seconds=time.monotonic() - self._begun)
        set_memory_options(self._policy, plan.combination, why="as planned")
        if self._combination not in (None, plan.combination):
            self._policy.sizes.evidence.forget_proven()
        self.prediction, self.reason = prediction, plan.reason
        self._combination, self.kind = plan.combination, decision.planner.kind(plan.combination)
        if plan.candidate is not None:
            self.alternatives = plan.alternatives
        self._policy.events.append(f"planned in {format_duration(prediction.planning_seconds)}: {plan.reason}")
        log.info("Planned in %s: %s", format_duration(prediction.planning_seconds), plan.reason)
        if shape is not None and plan.refused is not None:
            self._set_size(shape, plan.micro_batch_size, refused=plan.refused)
            self._policy.sizing.is_planned = True
        self._lengths = None
        is_split = plan.num_micro_batches > 1
        if shape is not None and decision.planner.is_light and (plan.combination, is_split) not in self._unlike:
            self._lengths = (PlannedLengths if is_split else LongerLengths)(
                decision.planner, plan.combination, policy=self._policy, module=self._trainer.lightning_module
            )

    def leaves_rows_unused(self, shape: BatchShape) -> bool:
        """Return whether shorter rows may fit in larger micro-batches than the plan sets."""
        sizes = self._policy.sizes
        is_known = self.prediction is None or sizes.runs_whole or sizes.is_proven(shape)
        return shape.elements not in self.shorter and not is_known and not self._policy.splits.refuses(shape.rows)

    @property
    def largest_of_lengths(self) -> Prediction | None:
        """The largest prediction among the lengths that needed no dry run; None without any."""
        return None if self._lengths is None else self._lengths.largest

    def plan_length(self, batch: Any, shape: BatchShape) -> bool:
        """Plan the micro-batch size for another row length from known traces; memory options stay.

        Returns:
            Whether rows of this length have a size now. Otherwise they need dry runs of their own.
        """
        lengths = self._lengths
        if lengths is None or self.prediction is None or self._policy.splits.refuses(shape.rows) or not lengths.hold:
            return False
        began = time.monotonic()
        try:
            found, is_new = lengths.plan(batch, shape, limit=self._budget.left)
        except UndoError:
            raise
        except Exception as error:  # in the module or the planner: each length then gets its own dry runs
            self._lengths = None
            if isinstance(error, MisalignedError) and self._combination is not None:
                self._unlike.add((self._combination, isinstance(lengths, PlannedLengths)))
            self._note(f"each row length is traced by itself: {error}")
            return False
        if found is None:
            return False
        if _bytes_of(found) > _bytes_of(self.prediction):
            self.prediction = replace(found, seconds=None)
        sizes = self._policy.sizes
        if found.num_micro_batches > 1 and sizes.micro_batch_size(shape) != found.rows:
            self._set_size(shape, found.rows, refused=more_rows(shape.rows, found.num_micro_batches))
        if is_new:
            seconds = format_duration(time.monotonic() - began)
            self._note(f"another row length planned in {seconds} from known traces: micro-batch size {found.rows}")
        return True

    def plan_shorter(self, batch: Any, shape: BatchShape) -> None:
        """Plan the micro-batch size for shorter rows, with the memory options that are set.

        The run keeps its main plan.
        """
        if len(self.shorter) >= _SHORTER:
            return
        self.shorter[shape.elements] = None
        if self._combination is None or self.speeds is None:
            return
        began, planner, limit = time.monotonic(), self._planner(batch, shape), self._budget.left
        try:
            size = self._policy.sizes.max_micro_batch_size
            if planner.fits(self._combination, micro_batch_size=size, limit=limit):
                self.shorter[shape.elements] = planner.predict(self._combination, micro_batch_size=size)
                return
            best = planner.choose([self._combination], budget_bytes=limit, rates=self.speeds.rates).best
            self.shorter[shape.elements] = None if best is None else planner.prediction_of(best)
        except UndoError:
            raise
        except Exception as error:  # in the module or the planner: recovery then finds the size that fits
            log.info("Shorter rows could not be planned for: %s", error)
            return
        if best is None or best.num_micro_batches == 1:
            return
        self._set_size(shape, best.micro_batch_size, refused=more_rows(shape.rows, best.num_micro_batches))
        seconds = format_duration(time.monotonic() - began)
        self._note(f"shorter rows planned in {seconds}: micro-batch size {best.micro_batch_size}")

    def _note(self, event: str) -> None:
        self._policy.events.append(event)
        log.info("%s", event)

    def _planner(self, batch: Any, shape: BatchShape | None, **sharded: Any) -> Planner:
        """Return the planner of a batch; `sharded` are further arguments of `planner_of`."""
        asks_time = self._policy.compilation.is_open
        return planner_of(
            self._trainer,
            self._policy,
            batch,
            shape,
            calibration=self.calibration,
            budget=self._budget,
            obstacle=self._obstacle(shape),
            rates=None if self.speeds is None or not asks_time else self.speeds.rates,
            **sharded,
        )

    def _obstacle(self, shape: BatchShape | None) -> str:
        """Return why a batch cannot be split; empty if it can."""
        return "" if shape is None else self._policy.splits.obstacle(shape.rows)

    def _decided(
        self, planner: Planner, combinations: list[Combination], own: Prediction, shape: BatchShape | None
    ) -> Decision:
        assert self.speeds is not None
        inputs = gather_inputs(
            planner,
            tuple(combinations),
            own,
            self._budget,
            policy=self._policy,
            speeds=self.speeds,
            rows=None if shape is None else shape.rows,
            obstacle=self._obstacle(shape),
            module=type(self._trainer.lightning_module).__name__,
            room=self._room,
        )
        return Decision(planner=planner, inputs=inputs, plan=decide(inputs))

    def _set_size(self, shape: BatchShape, micro_batch_size: int, *, refused: int) -> None:
        """Set the micro-batch size of such batches; `refused` rows are predicted not to fit."""
        room = self._policy.watch.bytes
        self._policy.sizes.plan(shape, micro_batch_size=micro_batch_size, refused=refused, room_bytes=room)


def _bytes_of(prediction: Prediction) -> tuple[int, int]:
    """Return the reserved bytes and the peak, by which the larger of two predictions is the run's."""
    return prediction.reserved_bytes, prediction.peak_bytes


def set_memory_options(policy: MemoryPolicy, combination: Combination, *, why: str) -> None:
    """Set the memory options of a policy.

    Options that `combination` leaves open stay as they are.
    """
    now = policy.recomputation.policy
    if (
        combination.recompute is not None
        and combination.recompute != now
        and (now is not None or combination.recompute.blocks)
    ):
        policy.recomputation.set(combination.recompute, why=why)
    if combination.optimizer_kernel is not None:
        policy.applied_options.set_kernel(combination.optimizer_kernel, why=why)  # pyright: ignore[reportArgumentType]
    if combination.loss_chunk is not None:
        policy.applied_options.set_loss_chunk(combination.loss_chunk, why=why)
    if combination.attention is not None:
        policy.applied_options.set_attention(combination.attention, why=why)  # pyright: ignore[reportArgumentType]
