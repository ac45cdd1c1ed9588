"""The plan of a fit, made when its first batch is there and acted upon before it runs; then held against what was measured."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.rates.calibration import Calibration, machine_key
from lightning_unified.cost_model.search import Candidate, Choice
from lightning_unified.cost_model.trace.interpolation import MisalignedError
from lightning_unified.errors import BudgetError, DryRunError
from lightning_unified.nn.cuda_graphs import is_recorded
from lightning_unified.planner.batch_kinds import Kinds
from lightning_unified.planner.batch_size_probe import tried
from lightning_unified.planner.first_validation import FirstValidation
from lightning_unified.planner.generation import with_generation
from lightning_unified.planner.held import held_bytes
from lightning_unified.planner.planner import Planner
from lightning_unified.planner.refusal import smallest
from lightning_unified.planner.setting import Setting
from lightning_unified.planner.settings import settings_to_compare
from lightning_unified.planner.speeds import RunSpeeds
from lightning_unified.planner.validation import outline
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_bytes

__all__ = ["FirstStep"]

log = logging.getLogger("lightning_unified")

_NEGLIGIBLE = 2000  # judgement: a step takes less than so many times its weights, state and batch, and what is between
_STEADY = 3  # batches after which the peak is that of every step: optimizer state is there, caches have their size
_SHORTER = 4  # judgement: lengths below the longest that are planned for; each takes a second or two, and data has few or countless


class FirstStep:
    """Traces a fit's step before the first batch runs, and sets its memory options and sizes so that it fits.

    Does nothing where nothing can be gained: sizes were found by another run, or the budget is thousands of times what weights and
    batch take. Where a step cannot be traced, or the dry run cannot be trusted, that is said, and sizes are found by trying.

    Args:
        trainer: The fit's.
        policy: Whose sizes and memory options are set.
        precision: That the fit runs in, by Lightning's name.
        reduction_bytes: What the device holds all the while to average gradients over ranks.

    Attributes:
        prediction: Of the step as it is set to run, with that of the validation step in it; None while there is none.
        alternatives: What else was looked at.
        reason: How the plan came about, in words.
        validation: What is foreseen of the validation step.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, precision: str, reduction_bytes: int = 0) -> None:
        self._trainer, self._policy, self._precision = trainer, policy, precision
        self._reduction_bytes = reduction_bytes
        self._module = trainer.lightning_module
        self._kinds, self._earlier_peak = Kinds(), 0  # the latter predicted of kinds before this one
        self._setting: Setting | None = None
        self._shorter: dict[int, Prediction | None] = {}
        self._kept_room = 0  # of the budget, for what the module keeps from step to step
        self._begun = 0.0
        self._foreign = self._batches = 0
        self._has_validated = self._is_negligible = False
        self._calibration: Calibration | None = None
        self._speeds: RunSpeeds | None = None
        self.validation = FirstValidation(trainer, policy, precision=precision)
        self._prediction: Prediction | None = None
        self._generation = self._kind = ""
        self.alternatives: tuple[Candidate, ...] = ()
        self.reason = "no batch has run yet"

    def look(self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult]) -> None:
        """Plan for `batch`, if it is the first of its kind, its rows are longer than any planned for, or shorter than some that were cut.

        Args:
            batch: Whole, and prepared.
            shape: Of it; None for one that has no rows to count.
            step: Runs `training_step` on a batch, as the loop does.

        Raises:
            BudgetError: If no plan fits.
        """
        elements = 1 if shape is None else shape.elements
        if self._kinds.covers(batch, elements):
            if shape is not None and self._could_run_more(shape):
                self._plan_shorter(batch, shape)
                if self._policy.watch.counts_process:
                    self._policy.watch.release()
                    self._policy.watch.count_anew()
            return
        if self._kinds.add(batch, elements):
            self._begin_kind()
        if not self._is_worth_it(batch):
            self.reason = "not worth it: sizes are known, or the budget is thousands of times weights and batch"
            return
        try:
            self._plan_beside_kept(batch, shape)
            if self._prediction is not None:
                self._prediction, self._generation = with_generation(
                    self._prediction, self._module, batch, precision=self._precision
                )
            self.validation.training_planned(batch, limit=self._left(), factor=self._factor)
            if self._policy.watch.counts_process:
                self._policy.watch.release()
            self._policy.watch.count_anew()  # what the dry run took of the host is no part of the run's peak
        except BudgetError:
            raise
        except Exception as error:  # of the module or the planner itself: a run must not end for want of a plan
            kind = "" if isinstance(error, (DryRunError, MisalignedError)) else f"{type(error).__name__}: "
            self._prediction, self.reason = None, f"not predicted: {kind}{error}"
            what_then = tried(
                self._trainer, policy=self._policy, batch=batch, shape=shape, step=step, why=f"{kind}{error}"
            )
            self.reason = f"{self.reason}; {what_then}"

    def _plan_beside_kept(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan around what the module keeps, and a tenth more for what it will; without it where nothing fits beside it."""
        kept = self._policy.kept
        self._kept_room = kept.bytes + kept.bytes // 10
        kept.give_back()
        try:
            self._plan(batch, shape)
        except BudgetError:
            if not self._kept_room:
                raise
            self._kept_room = 0
            self._plan(batch, shape)

    def _begin_kind(self) -> None:
        """Forget what was found for other kinds of batches; the run's peak is the largest of any."""
        self._earlier_peak = self.predicted_peak_bytes or 0
        self._shorter.clear()
        self._policy.sizes.forget()
        self._policy.events.append("batches are of another kind from here on: sizes are found for them anew")

    def _could_run_more(self, shape: BatchShape) -> bool:
        """Return whether such a batch would run in larger parts than longer rows, and nobody has told yet that these fit."""
        sizes = self._policy.sizes
        asked = shape.elements in self._shorter or len(self._shorter) >= _SHORTER
        untold = self._prediction is None or sizes.runs_whole or sizes.is_proven(shape)
        return not asked and not untold and not self._policy.splits.refuses(shape.rows)

    def _plan_shorter(self, batch: Any, shape: BatchShape) -> None:
        """Predict how many of these rows fit at once, with the memory options as they are set; the plan of the longest stays the run's."""
        self._shorter[shape.elements] = None
        if self._setting is None or self._speeds is None:
            return
        began, planner, limit = time.monotonic(), self._planner(batch, shape), self._left()
        try:
            size = self._policy.sizes.limit
            if planner.fits(self._setting, micro_batch_size=size, limit=limit):
                self._shorter[shape.elements] = planner.predict(self._setting, micro_batch_size=size)
                return
            best = planner.choose([self._setting], budget_bytes=limit, rates=self._speeds.rates).best
            self._shorter[shape.elements] = None if best is None else planner.prediction_of(best)
        except Exception as error:  # as in `look`; what fits is then found by trying
            log.info("Shorter rows could not be planned for: %s", error)
            return
        if best is None or best.parts == 1:
            return
        self._begin_with(shape, rows=best.micro_batch_size, parts=best.parts)
        seconds = time.monotonic() - began
        self._policy.events.append(f"shorter rows planned in {seconds:.1f} s: {best.micro_batch_size} at once")
        log.info("%s", self._policy.events[-1])

    def fits(self, rows: int) -> bool | None:
        """Return whether so many rows are predicted to fit at once, by no more than what was planned; None where nothing was.

        They do where the budget is thousands of times weights and batch, so that nothing is planned. A step of more rows than were
        planned takes at most as many times the memory: what does not grow with rows is counted too.
        """
        if self._prediction is None:
            return True if self._is_negligible else None
        times = rows / max(self._prediction.rows, 1)
        return times <= 1 or times * self._prediction.reserved_bytes <= self._left()

    def look_at_validation(self, batch: Any, shape: BatchShape | None) -> None:
        """Plan for a batch of validation, in the sanity check or later, if none as large has been planned for.

        Args:
            batch: Whole.
            shape: Of it; None for one that has no rows to count.
        """
        self._has_validated = self._batches > 0
        if not self._kinds.any and self._is_worth_it(batch):  # the sanity check
            self._foreign = self._held_by_others(batch)
        elif self._prediction is None:
            return
        self.validation.look(batch, shape, limit=self._left(), factor=self._factor)

    def batch_done(self) -> None:
        """Hold the prediction against what was measured, once the first batches are through; kept for the machine's next runs."""
        self._batches += self._prediction is not None
        if self._batches != _STEADY or self._calibration is None or self._has_validated or is_recorded(self._module):
            return  # nothing counts the activations that a replay has
        watch, predicted = self._policy.watch, self.predicted_peak_bytes
        measured = watch.measured_peak().bytes
        if watch.machine is not None or measured is None or predicted is None:
            return
        taken = measured - watch.fresh_code_bytes - self._foreign
        if taken > 0:
            self._calibration.record(self._kind, predicted_bytes=predicted - self._foreign, measured_bytes=taken)

    @property
    def prediction(self) -> Prediction | None:
        """What a step of training takes, and one of validation where there is one."""
        return None if self._prediction is None else replace(self._prediction, validation=self.validation.prediction)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """What the device's counter is to show at the peak of training or validation, with what the process held before and what the
        module keeps from step to step; None while nothing is predicted.
        """
        if self._prediction is None:
            return None
        of_process = self._policy.watch.counts_process
        peaks = [one.reserved_bytes if of_process else one.peak_bytes for one in self._steps]
        beside = max(peaks) + self._policy.kept.bytes
        return max(self._foreign + max(beside, self._prediction.generation_bytes), self._earlier_peak)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the budget beside the steps of training and validation; all of it without a plan: it would go around what is there."""
        if self._prediction is None:
            return self._policy.watch.bytes
        taken = int(self._factor * max(one.reserved_bytes for one in self._steps)) + self._policy.watch.driver_bytes
        left = self._policy.watch.bytes - max(self._foreign + taken, self._earlier_peak)
        return max(left, self._kept_room)  # steps that were planned around it give back what they hold for reuse

    @property
    def _steps(self) -> list[Prediction]:
        known = (self._prediction, self.validation.prediction, *self._shorter.values())
        return [one for one in known if one is not None]

    @property
    def reasons(self) -> dict[str, str]:
        """What else there is to say, by what it is about: the validation step, the speeds that were gone by, sizes that are multiples."""
        compared = bool(self.alternatives) and self._speeds is not None
        alignment = self._calibration.alignment if compared and self._calibration is not None else None
        said = {
            "validation": self.validation.reason,
            "generation": self._generation,
            "speeds": self._speeds.describe() if compared and self._speeds is not None else "",
            "alignment": "" if alignment is None else alignment.describe(),
        }
        return {name: words for name, words in said.items() if words}

    @property
    def _factor(self) -> float:
        """By what predictions of this kind were too low on this machine."""
        return 1.0 if self._calibration is None else self._calibration.peak_factor(self._kind)

    def _is_worth_it(self, batch: Any) -> bool:
        policy = self._policy
        held = self._held(batch) + static_bytes(self._module, self._trainer.optimizers)["gradients"]
        planned = self._prediction is not None and not policy.recoveries  # sizes are as predicted, and not as tried
        found_already = not planned and not policy.sizes.runs_whole and policy.sizes.has_evidence
        self._is_negligible = _NEGLIGIBLE * held <= policy.watch.bytes
        return not found_already and not self._is_negligible

    def _held_by_others(self, batch: Any) -> int:
        """Return the bytes of the pool that are held now and that no dry run counts."""
        watch = self._policy.watch
        return max((watch.reading().allocated.bytes or 0) - watch.fresh_code_bytes - self._held(batch), 0)

    def _held(self, batch: Any) -> int:
        """Return the bytes on the device that a dry run counts too."""
        on_host = self._policy.watch.counts_process
        return held_bytes(self._trainer, batch, on_host=on_host) + self._reduction_bytes

    def _plan(self, batch: Any, shape: BatchShape | None) -> None:
        policy, watch, self._begun = self._policy, self._policy.watch, time.monotonic()
        reading = watch.reading()
        self._foreign = self._held_by_others(batch)
        self._calibration = Calibration.load(
            machine_key(device=reading.name, total_bytes=reading.total.bytes, torch_version=torch.__version__)
        )
        self._speeds = RunSpeeds(watch, self._calibration, precision=self._precision)
        planner = self._planner(batch, shape)
        settings = self._settings()
        prediction = planner.predict(settings[0], micro_batch_size=policy.sizes.limit)
        if prediction.confidence == "low":
            notes = "; ".join(prediction.notes)
            raise DryRunError(f"values that decide shapes were made up on the way{f' ({notes})' if notes else ''}")
        setting, decided, reason = self._decided(planner, settings, prediction)
        if self._took_room(batch) and not planner.fits(setting, micro_batch_size=decided.rows, limit=self._left()):
            setting, decided, reason = self._decided(planner, settings, prediction)
        self._act(planner, setting, decided, shape, reason=reason)

    def _planner(self, batch: Any, shape: BatchShape | None) -> Planner:
        policy, watch, light = self._policy, self._policy.watch, outline(batch)
        return Planner(
            self._module,
            batch if light is None else light,  # what a dry run has seen lives until garbage is collected
            is_prepared=True,
            backend=watch.reading().backend,
            trainer=self._trainer,
            calibration=self._calibration,
            least=policy.sizes.least,
            most=policy.sizes.limit,
            unit=self._unit(shape),
            workspaces=watch.machine is None,
            reduction_bytes=self._reduction_bytes,
            mmap_threshold=watch.mmap_threshold,
        )

    def _decided(
        self, planner: Planner, settings: list[Setting], prediction: Prediction
    ) -> tuple[Setting, Prediction, str]:
        """Return what is set for what is left of the budget, what it takes, and why; `prediction` is that of the first of `settings`."""
        budget = self._left()
        if self._is_simple(planner, settings, prediction, budget=budget):
            return settings[0], prediction, f"fits: {format_bytes(prediction.reserved_bytes)} of {format_bytes(budget)}"
        return self._chosen(self._searched(planner, settings, budget=budget), planner, budget=budget)

    def _searched(self, planner: Planner, settings: list[Setting], *, budget: int) -> Choice:
        """Return the search's choice; again with what alignment gains where that could matter, by dry runs that were made."""
        assert self._speeds is not None
        choose = partial(planner.choose, settings, budget_bytes=budget, rates=self._speeds.rates, only_best=True)
        choice = choose()
        speeds = self._speeds
        if speeds.lacks_alignment and planner.could_be_aligned(choice) and speeds.alignment_pays():
            return choose()
        return choice

    def _chosen(self, choice: Choice, planner: Planner, *, budget: int) -> tuple[Setting, Prediction, str]:
        self.alternatives = choice.alternatives
        best = choice.best or smallest(
            choice, budget=budget, whose=type(self._module).__name__, tries=not self._kept_room
        )
        return planner.setting_of(best), planner.prediction_of(best), choice.reason

    def _took_room(self, batch: Any) -> bool:
        """Count what planning itself left in the pool of a CPU, code and holes, as held from now on; return whether it did."""
        watch, before = self._policy.watch, self._foreign
        if watch.counts_process:
            watch.release()
            self._foreign = self._held_by_others(batch)
        return self._foreign > before

    def _act(
        self, planner: Planner, setting: Setting, prediction: Prediction, shape: BatchShape | None, *, reason: str
    ) -> None:
        """Set memory options and sizes as decided."""
        self._adopt(planner, setting, prediction, reason=reason)
        sizes = self._policy.sizes
        if shape is not None and prediction.parts > 1 and (sizes.limit is None or prediction.rows < sizes.limit):
            self._begin_with(shape, rows=prediction.rows, parts=prediction.parts)

    def _begin_with(self, shape: BatchShape, *, rows: int, parts: int) -> None:
        """Have such batches cut into so many parts, where fewer are predicted not to fit."""
        refused, room = -(-shape.rows // (parts - 1)), self._policy.watch.bytes
        self._policy.sizes.plan(shape, rows=rows, refused=refused, room_bytes=room)

    def _settings(self) -> list[Setting]:
        """Return what is compared, the user's own first."""
        policy, now = self._policy, self._policy.recomputation.policy
        scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None
        return settings_to_compare(
            self._precision,
            # what another run needed, or shorter rows than these, is not tried with less
            policies=[now] if now is not None and now.everything else policy.recomputation.choices(),
            kernels=policy.applied_options.kernel_choices(scaled=scaled),
            chunks=policy.applied_options.chunk_choices(),
        )

    def _left(self) -> int:
        """Return the bytes of the budget that neither the process held before the fit nor the driver or the module holds beside it."""
        watch = self._policy.watch
        room = watch.room()
        whole = watch.bytes if room is None else min(watch.bytes, room)
        return whole - self._foreign - watch.driver_bytes - self._kept_room

    def _is_simple(self, planner: Planner, settings: list[Setting], prediction: Prediction, *, budget: int) -> bool:
        """Return whether the step fits as the user has it, and nothing that was left open could make it faster."""
        could_be_larger = prediction.parts > 1 and self._policy.sizes.limit is None
        could_be_faster = could_be_larger or any(one.optimizer_kernel for one in settings)
        if could_be_faster and len(settings) > 1:
            return False
        return planner.fits(settings[0], micro_batch_size=prediction.rows, limit=budget)

    def _unit(self, shape: BatchShape | None) -> int | None:
        """Return the rows that stay together: all of them where such a batch may not be cut."""
        return None if shape is None or not self._policy.splits.refuses(shape.rows) else shape.rows

    def _adopt(self, planner: Planner, setting: Setting, prediction: Prediction, *, reason: str) -> None:
        prediction = replace(prediction, planning_seconds=time.monotonic() - self._begun)
        self._set_memory_options(setting, why="as planned")
        self._prediction, self.reason = prediction, reason
        self._setting, self._kind = setting, planner.kind(setting)
        self._policy.events.append(f"planned in {prediction.planning_seconds:.1f} s: {reason}")
        log.info("Planned in %.1f s: %s", prediction.planning_seconds, reason)

    def _set_memory_options(self, setting: Setting, *, why: str) -> None:
        policy = self._policy
        now = policy.recomputation.policy
        if setting.recompute is not None and setting.recompute != now and (now is not None or setting.recompute.blocks):
            policy.recomputation.set(setting.recompute, why=why)
        if setting.optimizer_kernel is not None:
            policy.applied_options.set_kernel(setting.optimizer_kernel, why=why)  # pyright: ignore[reportArgumentType]
        if setting.loss_chunk is not None:
            policy.applied_options.set_loss_chunk(setting.loss_chunk, why=why)
