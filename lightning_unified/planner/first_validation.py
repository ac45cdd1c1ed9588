"""The validation steps of a fit, foreseen before the first of them runs, and their batches cut from the start where they do not fit."""

import logging
from typing import Any

import lightning as L

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.planner.validation import foresee_validation, outline
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import BatchShape

__all__ = ["FirstValidation"]

log = logging.getLogger("lightning_unified")


class FirstValidation:
    """Traces a fit's validation step when a batch of it is there that is larger than those before: the sanity check's at first.

    It is traced as it is in the middle of the fit, with optimizer state, so that it is known before training begins whether the
    validation that ends the first epoch will go through. Where a step of training cannot be traced on a batch of validation, or
    training was planned with memory options that validation feels too, it is traced once the first batch of training is there.

    Args:
        trainer: The fit's.
        policy: Whose sizes of evaluations are set.
        precision: That the fit runs in, by Lightning's name.

    Attributes:
        prediction: Of the largest step so far, as it is set to run; None while there is none.
        reason: How that came about, in words; empty while no batch of validation was seen.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, precision: str) -> None:
        self._trainer, self._policy, self._precision = trainer, policy, precision
        self._train_batch: Any = None
        self._largest: tuple[Any, BatchShape | None] | None = None  # outlined, until training has been planned
        self._seen: list[BatchShape] = []
        self._has_cut = False
        self.prediction: Prediction | None = None
        self.reason = ""

    def look(self, batch: Any, shape: BatchShape | None, *, limit: int, factor: float) -> None:
        """Plan for `batch`, if none as large has been planned for.

        Args:
            batch: Whole.
            shape: Of it; None for one that has no rows to count.
            limit: Bytes that the step may take.
            factor: By what predictions of this kind were too low on this machine.
        """
        size = shape or BatchShape(rows=1, elements=1)
        if any(size.rows <= known.rows and size.elements <= known.elements for known in self._seen):
            return
        self._seen.append(size)
        light = outline(batch)
        self._largest = self._largest if light is None else (light, shape)
        known = batch if light is None else light  # what a dry run has seen lives until garbage is collected
        self._plan(known, shape, limit=limit, factor=factor)

    def training_planned(self, train_batch: Any, *, limit: int, factor: float) -> None:
        """Keep how batches of training look, and plan anew where the plan of training has changed what validation takes.

        Args:
            train_batch: Whole, and prepared.
            limit: As for `look`.
            factor: As for `look`.
        """
        if self._trainer.enable_validation:
            self._train_batch = outline(train_batch)
        largest, self._largest = self._largest, None
        if largest is None or (self.prediction is not None and self._policy.applied_options.loss_chunk is None):
            return
        if self._has_cut:
            self._policy.evaluation_sizes.start_over()
        self._plan(*largest, limit=limit, factor=factor)

    def _plan(self, batch: Any, shape: BatchShape | None, *, limit: int, factor: float) -> None:
        sizes, watch = self._policy.evaluation_sizes, self._policy.watch
        if not sizes.runs_whole and not self._has_cut:
            self.reason = "not predicted: its sizes are known"
            return
        try:
            found = foresee_validation(
                self._trainer.lightning_module,
                batch,
                backend=watch.reading().backend,
                precision=self._precision,
                limit=limit,
                trainer=self._trainer,
                train_batch=self._train_batch,
                is_prepared=self._train_batch is not None,
                most=sizes.limit,
                factor=factor,
                workspaces=watch.machine is None,
                mmap_threshold=watch.mmap_threshold,
            )
        except Exception as error:  # of the module or the planner itself: a run must not end for want of a plan
            self.reason = f"not predicted: {error}"
            return
        self.prediction, self.reason = found.prediction, found.reason
        if found.refused is not None and shape is not None:
            sizes.plan(shape, rows=found.prediction.rows, refused=found.refused, room_bytes=watch.bytes)
            self._has_cut = True
            self._policy.events.append(f"validation planned: {found.reason}")
        if not found.fits:
            log.warning("The validation step is predicted not to fit. It %s.", found.reason)
