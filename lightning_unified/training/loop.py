"""The seam with Lightning: its automatic optimization, run as micro-batches and repeated smaller when memory runs out.

This is the one file that touches `_AutomaticOptimization`, private in lightning/pytorch/loops/optimization/automatic.py (read in
2.6.6); tests/training/test_seam.py pins its shape. A closure of our own is needed because Lightning's freezes the result of
`training_step` before `backward`: a strategy that splits inside these hooks gets the weights right, but callbacks see the first
micro-batch's outputs only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.errors import HalfUpdatedError, SplitError
from lightning_unified.training.logs import LogRecorder, MetricsOverParts
from lightning_unified.training.oom import is_out_of_memory
from lightning_unified.training.policy import MemoryPolicy
from lightning_unified.training.snapshot import BatchWatch, BufferWatch, HeldGradients, StepSnapshot
from lightning_unified.training.split import cut, num_rows
from lightning_unified.training.splittability import SplittabilityCheck
from lightning_unified.training.weighting import Weighting
from lightning_unified.training.weights import WeightsCopy, WeightsWatch

__all__ = ["UnifiedOptimization"]


class UnifiedOptimization(_AutomaticOptimization):
    """One optimization step of a batch: cut as the strategy says, exact, and repeated smaller after an out-of-memory error.

    Args:
        trainer: The Trainer whose batches are run.
        policy: How to cut and what to do when memory runs out.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy) -> None:
        super().__init__(trainer)
        module = trainer.lightning_module
        self._policy = policy
        self._buffers = BufferWatch(module)
        self._metrics = _metrics_of(module)
        self._check = SplittabilityCheck(trainer, step=self._training_step, metrics=lambda: self._metrics)
        self._gradients: HeldGradients | None = None
        self._weights: WeightsWatch | WeightsCopy | None = None
        self._phase = "forward"

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run the batch, and again in smaller parts for as long as memory runs out and a smaller part is possible."""
        if (
            "any" in kwargs and len(kwargs) == 1
        ):  # training_step(dataloader_iter) draws its own batches: nothing to cut or repeat
            return super().run(optimizer, batch_idx, kwargs)
        key = next(iter(kwargs))
        kwargs[key] = self._prepared(kwargs[key])
        rows = _rows_if_any(kwargs[key])
        if self._policy.recover:
            outputs = self._run_and_recover(optimizer, batch_idx, kwargs, rows=rows)
        else:
            outputs = super().run(optimizer, batch_idx, kwargs)
        self._policy.batch_done(rows)
        return outputs

    def _run_and_recover(
        self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]", *, rows: int | None
    ) -> dict[str, Any]:
        key, attempt = next(iter(kwargs)), 0
        snapshot = StepSnapshot(self.trainer, buffers=self._buffers, metrics=self._metrics)
        batch = BatchWatch(kwargs[key])
        while True:
            self._gradients, self._weights, self._phase = HeldGradients(optimizer), None, "forward"
            outputs, reason = self._attempt(optimizer, batch_idx, kwargs)
            if reason is None:
                break
            attempt += 1
            self._step_back(snapshot)
            kwargs[key] = batch.again()
            self._policy.out_of_memory(phase=self._phase, reason=reason, rows=rows, attempt=attempt)
        self._gradients = self._weights = None
        self._buffers.learn()
        if self.trainer.global_step <= 1:
            self._metrics = _metrics_of(self.trainer.lightning_module)  # a first step may have made metrics
        return outputs

    def _attempt(
        self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]"
    ) -> tuple[dict[str, Any], str | None]:
        """Return the outputs and None, or nothing and why memory ran out; the error and its frames are gone on return."""
        try:
            return super().run(optimizer, batch_idx, OrderedDict(kwargs)), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip()

    def _step_back(self, snapshot: StepSnapshot) -> None:
        """Undo what the failed attempt did, the weights first: when they cannot be, nothing else matters."""
        if self._weights is not None and not self._weights.restore():
            raise HalfUpdatedError(
                "memory ran out while the optimizer was writing weights, and some are written already; the run stops here so that no "
                "half-updated weight is ever saved. Resume from the last checkpoint with an optimizer that needs no temporaries "
                "(fused=True), a smaller memory.micro_batch_size, or optimizer_rollback=True, which keeps a copy to go back to."
            )
        self._weights = None
        if self._gradients is not None:
            self._gradients.restore()
        self._gradients = None
        snapshot.restore()

    def _prepared(self, batch: Any) -> Any:
        """Return what the module's `prepare_batch` makes of the undivided batch; a repeated step reuses it."""
        prepare = getattr(self.trainer.lightning_module, "prepare_batch", None)
        if prepare is None:
            return batch
        with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
            return prepare(batch)

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        return _MicroBatchClosure(self, self._cut(kwargs), optimizer, zero_grad)

    def _cut(self, kwargs: "OrderedDict[str, Any]") -> "_WholeBatch | _CutBatch":
        """Return the batch as it is to run: whole, if it fits and where nothing can be counted that could be cut."""
        key = next(iter(kwargs))
        batch, whole = kwargs[key], _WholeBatch(self._make_step_fn(kwargs))
        if self._policy.sizes.limit is None or (_rows_if_any(batch) is None and not self._splittable()):
            return whole
        rows = num_rows(batch)
        sizes = self._policy.sizes.parts(rows)
        if len(sizes) == 1:
            return whole
        self._policy.allow_split(rows)
        try:
            count = self._checked(kwargs, rows)
        except SplitError as refusal:
            if self._policy.runs_whole(refusal):
                return whole
            raise
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        parts = [cut(batch, start, start + size, rows=rows) for start, size in zip(starts, sizes, strict=True)]
        return _CutBatch(
            [partial(self._training_step, OrderedDict(kwargs, **{key: part})) for part in parts],
            Weighting(self.trainer.lightning_module, parts, sizes, count=count),
            results=self.trainer.fit_loop.epoch_loop._results,
            metrics=self._metrics,
        )

    def _checked(self, kwargs: "OrderedDict[str, Any]", rows: int) -> Callable[[Any], Any] | None:
        """Return what counts a micro-batch's loss terms, None for rows or as declared; raise if nothing does."""
        if not self._policy.check_split:
            return None
        verdict = self._check.verdict(kwargs, rows=rows, unit=self._policy.sizes.unit)
        self._policy.split_checked(verdict)
        return verdict.count

    def _splittable(self) -> bool:
        return getattr(self.trainer.lightning_module, "splittable", True) is not False

    def backward_part(self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool) -> Tensor:
        """Run one micro-batch's backward; the gradients of earlier batches of a window are out of its way."""
        self._phase = "backward"
        if first and self._gradients is not None:
            self._gradients.hold()
        scaled = call._call_strategy_hook(self.trainer, "backward_part", loss, optimizer, share)
        self._phase = "forward"
        return scaled

    def after_backward(self, loss: Tensor) -> None:
        """Run what follows a batch's last backward, on the gradients of the window so far."""
        self._phase = "backward"
        if self._gradients is not None:
            self._gradients.add_back()
        call._call_strategy_hook(self.trainer, "after_backward", loss)

    def before_weights(self, optimizer: Optimizer) -> None:
        """Note weights and optimizer state before they are written; an optimizer that runs its closure again has written already."""
        if self._policy.recover and not self.trainer.fit_loop._should_accumulate():
            if self._weights is None:
                self._weights = (WeightsCopy if self._policy.optimizer_rollback else WeightsWatch)(optimizer)
            self._phase = "optimizer step"


class _WholeBatch:
    """A batch that runs as Lightning runs it."""

    parts = 1

    def __init__(self, step: Callable[[], ClosureResult]) -> None:
        self._step = step

    def begin(self) -> None:
        """Nothing is gathered over parts."""

    def step(self, _index: int) -> ClosureResult:
        """Run `training_step`."""
        return self._step()

    def recording(self) -> AbstractContextManager[None]:
        """Leave `self.log` alone."""
        return nullcontext()

    def share(self, _index: int) -> float | None:
        """Return None: the loss is the batch's own."""
        return None

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the one result."""
        return outputs[0]


class _CutBatch:
    """A batch that runs as micro-batches, and what they come to together: loss, extras, logs and metrics of the whole."""

    def __init__(
        self,
        steps: Sequence[Callable[[], ClosureResult]],
        weighting: Weighting,
        *,
        results: _ResultCollection,
        metrics: Sequence[Metric],
    ) -> None:
        self.parts = len(steps)
        self._steps, self._weighting, self._results, self._all_metrics = steps, weighting, results, metrics
        self._recorder = LogRecorder(weighting.average)
        self._metrics = MetricsOverParts(())

    def begin(self) -> None:
        """Start afresh; some optimizers run their closure, and so the batch, several times a step."""
        self._recorder = LogRecorder(self._weighting.average)
        self._metrics = MetricsOverParts(self._all_metrics)

    def step(self, index: int) -> ClosureResult:
        """Run `training_step` on one micro-batch; without a loss term in it there is no loss, and no backward."""
        self._recorder.next_part(index)
        with self.recording(), self._metrics.watching():
            output = self._steps[index]()
        output.extra = recursive_detach(output.extra)  # the graph must end with the micro-batch
        if self.share(index) == 0:
            output.closure_loss = output.loss = None
        return output

    def recording(self) -> AbstractContextManager[None]:
        """Hold back what is logged inside the block."""
        return self._recorder.recording(self._results)

    def share(self, index: int) -> float | None:
        """Return by what the micro-batch's loss is multiplied to be its share of the batch's; None if it is that already."""
        return self._weighting.share(index)

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the whole batch's result, and log what was held back."""
        self._metrics.finish()
        self._recorder.flush(self._results)
        return self._weighting.join(outputs)


class _MicroBatchClosure(Closure):
    """Lightning's closure over several micro-batches, in its order: training_step, zero_grad, backward, then the next one."""

    def __init__(
        self,
        loop: UnifiedOptimization,
        batch: _WholeBatch | _CutBatch,
        optimizer: Optimizer,
        zero_grad: Callable[[], None] | None,
    ) -> None:
        super().__init__(step_fn=partial(batch.step, 0), backward_fn=None, zero_grad_fn=zero_grad)
        self._loop, self._batch, self._optimizer = loop, batch, optimizer

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        loop, batch = self._loop, self._batch
        outputs: list[ClosureResult] = []
        scaled: Tensor | None = None
        batch.begin()
        for index in range(batch.parts):
            output = batch.step(index)
            if index == 0 and self._zero_grad_fn is not None:
                self._zero_grad_fn()
            if output.closure_loss is not None and not loop._skip_backward:
                with batch.recording():
                    scaled = loop.backward_part(
                        output.closure_loss, self._optimizer, share=batch.share(index), first=scaled is None
                    ).detach()
            output.closure_loss = None  # the graph ends here, before the next micro-batch builds its own
            outputs.append(output)
        if scaled is not None:
            loop.after_backward(scaled)
        result = batch.join(outputs)
        if result.loss is None:
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        loop.before_weights(self._optimizer)
        return result


def _metrics_of(module: L.LightningModule) -> list[Metric]:
    return [metric for metric in module.modules() if isinstance(metric, Metric) and metric._defaults]


def _rows_if_any(batch: Any) -> int | None:
    """Return the rows of `batch`, or None for a batch that cannot be counted: it runs whole."""
    try:
        return num_rows(batch)
    except SplitError:
        return None
