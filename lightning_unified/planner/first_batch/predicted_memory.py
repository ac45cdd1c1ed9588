"""The memory that the plans of a fit take.

It holds one predicted peak, the bytes to spare, and the comparison with the measured peak.
"""

from dataclasses import replace

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.planner.first_batch.planning import StepPlanning
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.other_phases import FirstValidation
from lightning_unified.step.policy import MemoryPolicy

__all__ = ["PredictedMemory"]


class PredictedMemory:
    """The predicted memory of a fit, from the plans of its training and validation steps.

    Attributes:
        earlier_peak: The predicted peak of earlier kinds of batches, in bytes.
    """

    def __init__(
        self, policy: MemoryPolicy, budget: StepBudget, planning: StepPlanning, validation: FirstValidation
    ) -> None:
        self._policy, self._budget, self._planning, self._validation = policy, budget, planning, validation
        self.earlier_peak = 0

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the training step, with that for the validation step.

        The result is None without a plan.
        """
        own = self._planning.prediction
        return None if own is None else replace(own, validation=self._validation.prediction)

    @property
    def peak_bytes(self) -> int | None:
        """The predicted peak of training and validation; None without a prediction.

        It is comparable with the device's counter. It includes the memory that the process held before, the memory that the
        module keeps from step to step, and the copy of an asynchronous save.
        """
        own = self._planning.prediction
        if own is None:
            return None
        of_process = self._policy.watch.counts_process
        peaks = [one.reserved_bytes if of_process else one.peak_bytes for one in self._predictions]
        beside = max(peaks) + self._policy.kept.bytes + self._budget.copy_bytes
        return max(self._budget.foreign_bytes + max(beside, own.generation_bytes), self.earlier_peak)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the budget that no step takes.

        Without a plan it is the whole budget, because a plan leaves room for kept memory.
        """
        watch = self._policy.watch
        if self._planning.prediction is None:
            return watch.bytes
        taken = int(self.factor * max(one.reserved_bytes for one in self._predictions)) + watch.driver_bytes
        left = watch.bytes - max(self._budget.foreign_bytes + self._budget.copy_bytes + taken, self.earlier_peak)
        return max(left, self._budget.kept_bytes)  # the plan left room for these bytes: a step returns cached blocks

    @property
    def factor(self) -> float:
        """Correction for predictions of this kind on this machine, 1 or more."""
        calibration = self._planning.calibration
        return 1.0 if calibration is None else calibration.peak_factor(self._planning.kind)

    def record_measured(self, measured: int | None) -> None:
        """Store a measured peak, in bytes, beside the predicted one; later runs on this machine use it."""
        watch, predicted, calibration = self._policy.watch, self.peak_bytes, self._planning.calibration
        if calibration is None or watch.machine is not None or measured is None or predicted is None:
            return
        foreign = self._budget.foreign_bytes
        taken = measured - watch.fresh_code_bytes - foreign
        if taken > 0:
            calibration.record(self._planning.kind, predicted_bytes=predicted - foreign, measured_bytes=taken)

    @property
    def _predictions(self) -> list[Prediction]:
        planning = self._planning
        known = (
            planning.prediction,
            planning.largest_of_lengths,
            self._validation.prediction,
            *planning.shorter.values(),
        )
        return [one for one in known if one is not None]
