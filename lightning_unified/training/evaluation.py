"""Validation, test and predict steps: run whole, and in parts once memory runs out in one, with what they give put together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L

from lightning_unified.training.cutter import Cutter
from lightning_unified.training.foresight import Foresight
from lightning_unified.training.generators import GeneratorWatch
from lightning_unified.training.logs import LogRecorder, MetricsOverParts
from lightning_unified.training.oom import caught
from lightning_unified.training.policy import MemoryPolicy
from lightning_unified.training.snapshot import StepSnapshot
from lightning_unified.training.split import BatchShape, merge
from lightning_unified.training.undo import EVALUATION_STEPS, BatchWatch, StateWatch, roots_of
from lightning_unified.training.weighting import Weighting

__all__ = ["EvaluationSteps"]

_STAGES = {"validation": "validate", "test": "test", "predict": "predict"}


class EvaluationSteps:
    """Runs the steps of evaluations, each as one batch to whoever looks at what it logged and returned.

    Figures are averaged over the parts by loss terms where the module says or training has shown what they are, else by rows; a
    figure logged with its own `batch_size` by that. In predict, which has no loss, by rows. Tensors and lists of one entry a row are
    put one after another, and torchmetrics objects gather the parts as they gather batches.

    Args:
        trainer: Whose evaluations these are.
        policy: How to cut, and what to do when memory runs out.
        foresight: What plans for a batch of validation before it runs; None where nothing is predicted.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, foresight: Foresight | None = None) -> None:
        self._trainer, self._policy, self._foresight = trainer, policy, foresight
        self._module = trainer.lightning_module
        self._cutters: dict[str, Cutter] = {}
        self._state = StateWatch(partial(roots_of, self._module, trainer, EVALUATION_STEPS))
        self._generators = GeneratorWatch(trainer.strategy.root_device)

    def run(self, step: Callable[..., Any], *args: Any, phase: str) -> Any:
        """Return what `step(*args)` gives of the whole batch.

        Args:
            step: The strategy's `validation_step`, `test_step` or `predict_step`.
            *args: Its arguments, the batch first.
            phase: `"validation"`, `"test"` or `"predict"`.

        Raises:
            OutOfMemoryError: If the smallest part does not fit.
        """
        batch, *rest = args
        shape = self._cutter(phase).shape(batch)
        if self._foresight is not None and phase == "validation":
            self._foresight.look_at_validation(batch, shape)
        if not self._policy.recover:
            self._state.look()
            return self._attempt(step, batch, rest, shape=shape, phase=phase)
        attempt = 0
        while True:
            snapshot, watch = self._snapshot(), BatchWatch(batch)
            output, reason = caught(partial(self._attempt, step, batch, rest, shape=shape, phase=phase))
            if reason is None:
                if shape is not None:
                    self._policy.evaluation_sizes.worked(shape)
                self._state.learn(snapshot.state)
                return output
            attempt += 1
            snapshot.restore()
            self._state.forget()
            batch = watch.again()
            del snapshot, watch
            self._policy.out_of_memory(phase=phase, reason=reason, shape=shape, attempt=attempt, batch=batch)

    def _snapshot(self) -> StepSnapshot:
        return StepSnapshot(
            self._trainer, state=self._state, generators=self._generators, results=self._trainer._results
        )

    def _attempt(
        self, step: Callable[..., Any], batch: Any, rest: list[Any], *, shape: BatchShape | None, phase: str
    ) -> Any:
        if shape is None or len(sizes := self._policy.evaluation_sizes.parts(shape)) == 1:
            return step(batch, *rest)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        parts = [
            self._cutter(phase).cut(batch, start, start + size, rows=shape.rows)
            for start, size in zip(starts, sizes, strict=True)
        ]
        weighting = self._weighting(parts, sizes, phase=phase)
        recorder, metrics = LogRecorder(weighting.average), MetricsOverParts(self._state.metrics)
        results, outputs = self._trainer._results, []
        for index, part in enumerate(parts):
            recorder.next_part(index)
            with recorder.recording(results), metrics.watching():
                outputs.append(step(part, *rest))
        metrics.finish()
        if results is not None:
            recorder.flush(results)
        return merge(outputs, sizes=sizes, average=weighting.average)

    def _cutter(self, phase: str) -> Cutter:
        if phase not in self._cutters:
            self._cutters[phase] = Cutter(self._module, self._policy.rules(_STAGES[phase]))
        return self._cutters[phase]

    def _weighting(self, parts: list[Any], sizes: list[int], *, phase: str) -> Weighting:
        if phase == "predict":
            return Weighting(None, parts, sizes)
        return Weighting(self._policy.rules(_STAGES[phase]), parts, sizes, count=self._policy.count, adds=False)
