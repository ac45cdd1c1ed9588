"""Plan a fit's step before its first batch, and check the prediction after a few steps.

A batch gets a plan if it is the first of its kind, or if its rows are longer than any planned before. Planning has three steps:

1. gather: a dry run of the step, the bytes left in the budget, the open memory options and the machine's speeds (`gather.py`);
2. decide: a pure function from these inputs to a plan (`decide.py`);
3. apply: memory options and micro-batch size are set on the policy (`planning.py`).

If the step cannot be traced, the batch-size probe runs a few rows on the device instead (`batch_size_probe.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.cost_model.trace.interpolation import MisalignedError
from lightning_unified.errors import BudgetError, DryRunError, UndoError
from lightning_unified.nn.cuda_graphs import is_recorded
from lightning_unified.planner.first_batch.batch_size_probe import probe_sizes
from lightning_unified.planner.first_batch.gather import compile_cost
from lightning_unified.planner.first_batch.idle_norms import finds_idle_norms
from lightning_unified.planner.first_batch.planning import StepPlanning
from lightning_unified.planner.first_batch.predicted_memory import PredictedMemory
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.garbage import no_collection
from lightning_unified.planner.other_phases import FirstValidation, with_generation
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape
from lightning_unified.terminal import activity

__all__ = ["BatchKinds", "FirstStep"]

_STEADY = 3  # batches until the peak is that of every step: optimizer state exists, and caches have their final size
_KINDS = 4  # kinds that are kept apart; in a fit with more, batches differ by chance


class FirstStep:
    """Traces a fit's step before the first batch runs, and sets memory options to fit it.

    It does nothing if a plan gains nothing: an earlier run found the sizes, or the budget is thousands of times the bytes of weights and
    batch. If the step cannot be traced or the dry run cannot be trusted, it says so and the batch-size probe finds the sizes.

    Args:
        reduction_bytes: Bytes that the device holds during the whole fit to average gradients over ranks.
        planning: Makes `planning`, from the arguments of `StepPlanning`.
        budget: Makes `budget`, from the arguments of `StepBudget`.
        sharding: How the fit shards its module; None trains the whole module on the device.

    Attributes:
        budget: The part of the budget that a step may take.
        planning: Gathers, decides and applies; holds the current plan.
        validation: The plan of the validation step.
        memory: The predicted memory of these plans.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: MemoryPolicy,
        *,
        precision: str,
        reduction_bytes: int = 0,
        planning: Callable[..., StepPlanning] = StepPlanning,
        budget: Callable[..., StepBudget] = StepBudget,
        sharding: Sharding | None = None,
    ) -> None:
        self._trainer, self._policy, self._precision = trainer, policy, precision
        self._module = trainer.lightning_module
        self.budget = budget(trainer, policy, reduction_bytes=reduction_bytes)
        self.planning = planning(trainer, policy, self.budget, precision=precision)
        self.validation = FirstValidation(trainer, policy, precision=precision, sharding=sharding)
        self.memory = PredictedMemory(policy, self.budget, self.planning, self.validation)
        self._kinds = BatchKinds()
        self._batches = 0
        self._has_checked = self._counts_anew = self._is_measured = False
        self._has_validated = self._is_ample = False
        self._generation = ""

    def look(self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult]) -> None:
        """Plan for `batch` if its kind or its row length is new.

        For another row length, plan only the micro-batch size, from known traces where they determine it. Longer rows that they do not
        determine get a plan of their own.

        The rule `prepare` has been applied to the batch. Its shape is None if it has no row dimension.

        Raises:
            BudgetError: If no plan fits.
            UndoError: If planning changed state that cannot be restored.
        """
        watch, elements = self._policy.watch, 1 if shape is None else shape.elements
        covered = self._kinds.covers(batch, elements)
        if covered and (shape is None or not self.planning.leaves_rows_unused(shape)):
            return
        if shape is not None and self._kinds.knows(batch) and self._plan_length(batch, shape, covered=covered):
            return
        if self._kinds.add(batch, elements):
            self._begin_kind()
        if not self._is_worth_it(batch):
            self.planning.reason = (
                "not worth it: sizes are known, or the budget is thousands of times weights and batch"
            )
            return
        try:
            with activity("planning the step"), no_collection():
                try:
                    self._plan_all(batch, shape)
                except BudgetError:
                    if not finds_idle_norms(self._trainer, self._policy, batch, shape, step=step):
                        raise
                    self._plan_all(batch, shape)
            if watch.counts_process:
                watch.release()
            watch.count_anew()  # memory of the dry run on the host is no part of the run's peak
        except (BudgetError, UndoError):
            raise
        except Exception as error:  # in the module or the planner: a run must not end because it has no plan
            kind = "" if isinstance(error, (DryRunError, MisalignedError)) else f"{type(error).__name__}: "
            why = f"{kind}{error}"
            self.planning.prediction = None
            self.planning.reason = f"not predicted: {why}; {self._found_without_plan(batch, shape, step=step, why=why)}"

    def _found_without_plan(
        self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult], why: str
    ) -> str:
        """Find the micro-batch size of a step that cannot be traced; return how, in words."""
        with activity("probing batch sizes"):
            return probe_sizes(self._trainer, policy=self._policy, batch=batch, shape=shape, step=step, why=why)

    def _plan_length(self, batch: Any, shape: BatchShape, *, covered: bool) -> bool:
        """Plan the micro-batch size for another row length; return False if that needs a new plan.

        Longer rows may need one.
        """
        watch = self._policy.watch
        with activity("planning another row length"), no_collection():
            planned = not self._generation and self.planning.plan_length(batch, shape)
            if covered and not planned:
                self.planning.plan_shorter(batch, shape)
        if planned and not covered:
            self._kinds.add(batch, shape.elements)
        if watch.counts_process:
            watch.release()
            watch.count_anew()
        return planned or covered

    def _plan_all(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan the training step, the generation before it and the validation step."""
        planning = self.planning
        planning.plan_beside_kept(batch, shape)
        if self._compiles():
            planning.plan_beside_kept(batch, shape)
        if planning.prediction is not None:
            planning.prediction, self._generation = with_generation(
                planning.prediction, self._module, batch, precision=self._precision
            )
        self.validation.training_planned(batch, limit=self.budget.left, factor=self.memory.factor)

    def _compiles(self) -> bool:
        """Decide about compilation; return whether the blocks are compiled from now on."""
        policy, prediction = self._policy, self.planning.prediction
        if not policy.compilation.is_open or prediction is None:
            return False
        seconds = None if prediction.seconds is None else prediction.seconds - prediction.generation_seconds
        cost = compile_cost(self._trainer, policy, step_seconds=seconds)
        if not policy.compilation.decide(cost):
            return False
        policy.recomputation.reapply()
        return True

    def _begin_kind(self) -> None:
        """Discard the sizes found for other kinds of batches, and keep their predicted peak.

        The run's peak is the largest of all kinds.
        """
        self.memory.earlier_peak = self.memory.peak_bytes or 0
        self.planning.shorter.clear()
        self._policy.sizes.evidence.forget()
        self._policy.events.append("batches are of another kind from here on: sizes are found for them anew")

    def _is_worth_it(self, batch: Any) -> bool:
        policy = self._policy
        follows_plan = self.planning.prediction is not None and not policy.recoveries
        found_already = not follows_plan and not policy.sizes.runs_whole and policy.sizes.evidence
        self._is_ample = self.budget.is_ample(batch)
        return not found_already and not self._is_ample

    def fits(self, rows: int) -> bool | None:
        """Return whether `rows` are predicted to fit in one micro-batch; None without a plan.

        They fit if the budget is thousands of times weights and batch. A larger micro-batch than planned takes at most proportionally
        more memory, because the prediction includes memory that does not grow with rows.
        """
        prediction = self.planning.prediction
        if prediction is None:
            return True if self._is_ample else None
        times = rows / max(prediction.rows, 1)
        return times <= 1 or times * prediction.reserved_bytes <= self.budget.left

    def look_at_validation(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan for a validation batch, unless a batch as large already has a plan."""
        self._has_validated = self._batches > 0
        if not self._kinds.any and self._is_worth_it(batch):  # the sanity check
            self.budget.note_foreign(batch)
        elif self.planning.prediction is None:
            return
        self.validation.look(batch, shape, limit=self.budget.left, factor=self.memory.factor)

    def note_check(self) -> None:
        """Note that an exactness check runs, whose memory is no step's."""
        self._has_checked = True

    def batch_done(self) -> None:
        """Record the measured peak beside the predicted one, after the first batches.

        After an exactness check, the peak is counted anew, and recorded after the first batch without a check.
        """
        self._batches += self.planning.prediction is not None
        if self._is_measured or self._batches < _STEADY - 1:
            return
        if self._has_validated or is_recorded(self._module):  # a recorded graph's activations are in no counter
            self._is_measured = True
        elif self._has_checked:
            self._has_checked, self._counts_anew = False, True
            self._is_measured = self._policy.watch.next_peak().bytes is None
        elif self._batches >= _STEADY:
            watch, self._is_measured = self._policy.watch, True
            self.memory.record_measured(watch.next_peak().bytes if self._counts_anew else watch.measured_peak().bytes)

    @property
    def reasons(self) -> dict[str, str]:
        """Further explanations by subject: validation, generation, speeds, alignment."""
        planning = self.planning
        speeds = planning.speeds if planning.alternatives else None
        alignment = None if speeds is None or planning.calibration is None else planning.calibration.alignment
        found = {
            "validation": self.validation.reason,
            "generation": self._generation,
            "speeds": "" if speeds is None else speeds.describe(),
            "alignment": "" if alignment is None else alignment.describe(),
        }
        return {name: words for name, words in found.items() if words}


class BatchKinds:
    """The longest rows that have a plan, by kind of batch.

    A fit may change its batches, e.g. from supervised to RL phases.
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[str, ...], int] = {}

    @property
    def any(self) -> bool:
        """Whether any batch has a plan."""
        return bool(self._longest)

    def knows(self, batch: Any) -> bool:
        """Return whether a batch of this kind has a plan."""
        return self._of(batch) in self._longest

    def covers(self, batch: Any, elements: int) -> bool:
        """Return whether rows of this kind that are as long, or longer, have a plan."""
        return elements <= self._longest.get(self._of(batch), 0)

    def add(self, batch: Any, elements: int) -> bool:
        """Note a plan for rows of this length; return whether their kind is new and not the first."""
        kind = self._of(batch)
        is_new = bool(self._longest) and kind not in self._longest
        self._longest[kind] = elements
        return is_new

    def _of(self, batch: Any) -> tuple[str, ...]:
        """Return the kind of a batch: its type, and the field names of a mapping.

        Once there are too many kinds, it is the newest known one.
        """
        names = sorted(map(str, batch.keys())) if isinstance(batch, Mapping) else []
        kind = (type(batch).__name__, *names)
        return kind if kind in self._longest or len(self._longest) < _KINDS else next(reversed(self._longest))
