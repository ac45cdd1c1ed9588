"""The seam with Lightning: its automatic optimization, run as micro-batches and repeated smaller when memory runs out.

This is the one file that touches `_AutomaticOptimization`, private in lightning/pytorch/loops/optimization/automatic.py (read in
2.6.6); tests/training/test_seam.py pins its shape. A closure of our own is needed because Lightning's freezes the result of
`training_step` before `backward`: a strategy that splits inside these hooks gets the weights right, but callbacks see the first
micro-batch's outputs only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, HalfUpdatedError, SplitError
from lightning_unified.training.logs import LogRecorder, MetricsOverParts
from lightning_unified.training.oom import is_out_of_memory
from lightning_unified.training.sizes import MicroBatchSize
from lightning_unified.training.snapshot import BufferWatch, HeldGradients, StepSnapshot
from lightning_unified.training.split import cut, merge, num_rows
from lightning_unified.training.weights import WeightsCopy, WeightsWatch

__all__ = ["SplitPolicy", "UnifiedOptimization"]


class SplitPolicy(Protocol):
    """What the loop asks of the strategy it runs under."""

    sizes: MicroBatchSize
    recover: bool
    optimizer_rollback: bool

    def allow_split(self, rows: int) -> None:
        """Raise `SplitError` if the module cannot be cut; called before a batch of `rows` is."""

    def backward_part(self, loss: Tensor, optimizer: Optimizer) -> Tensor:
        """Run one micro-batch's backward, without what follows the batch's last; return the loss as the scaler made it."""
        ...

    def after_backward(self, loss: Tensor) -> None:
        """Run what follows the last backward of a batch."""

    def out_of_memory(self, *, phase: str, reason: str, rows: int | None, unit: int, attempt: int) -> None:
        """Free memory and choose a smaller size, or raise if there is none."""

    def batch_done(self, rows: int | None) -> None:
        """Learn from a batch that went well."""


class UnifiedOptimization(_AutomaticOptimization):
    """One optimization step of a batch: cut as the strategy says, exact, and repeated smaller after an out-of-memory error.

    Args:
        trainer: The Trainer whose strategy is the policy.
        policy: How to cut and what to do when memory runs out.
    """

    def __init__(self, trainer: L.Trainer, policy: SplitPolicy) -> None:
        super().__init__(trainer)
        module = trainer.lightning_module
        self._policy = policy
        self._buffers = BufferWatch(module)
        self._metrics = _metrics_of(module)
        self._unit = _micro_batch_unit(module)
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
        snapshot, attempt = StepSnapshot(self.trainer, buffers=self._buffers, metrics=self._metrics), 0
        while True:
            self._gradients, self._weights, self._phase = HeldGradients(optimizer), None, "forward"
            outputs, reason = self._attempt(optimizer, batch_idx, kwargs)
            if reason is None:
                break
            attempt += 1
            self._step_back(snapshot)
            self._policy.out_of_memory(phase=self._phase, reason=reason, rows=rows, unit=self._unit, attempt=attempt)
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
        key = next(iter(kwargs))
        batch = kwargs[key]
        rows = num_rows(batch) if self._policy.sizes.limit is not None else None
        sizes = [0] if rows is None else self._policy.sizes.parts(rows, unit=self._unit)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        if len(sizes) == 1:
            return self._closure([self._make_step_fn(kwargs)], optimizer, zero_grad, join=None)
        assert rows is not None
        self._policy.allow_split(rows)
        return self._split_closure(kwargs, optimizer, zero_grad, batch=batch, rows=rows, sizes=sizes)

    def _split_closure(
        self,
        kwargs: "OrderedDict[str, Any]",
        optimizer: Optimizer,
        zero_grad: Callable[[], None] | None,
        *,
        batch: Any,
        rows: int,
        sizes: list[int],
    ) -> Closure:
        key, module = next(iter(kwargs)), self.trainer.lightning_module
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        parts = [cut(batch, start, start + size, rows=rows) for start, size in zip(starts, sizes, strict=True)]
        weighting = _Weighting(module, parts, sizes)
        recorder = LogRecorder(weighting.average)
        results = self.trainer.fit_loop.epoch_loop._results
        metrics = MetricsOverParts(self._metrics, sizes)

        def step(index: int) -> ClosureResult:
            recorder.next_part(index)
            with recorder.recording(results):
                output = self._training_step(OrderedDict(kwargs, **{key: parts[index]}))
            metrics.after_part()
            return weighting.apply(output, index)

        def joined(outputs: Sequence[ClosureResult]) -> ClosureResult:
            metrics.finish()
            recorder.flush(results)
            return weighting.join(outputs)

        steps = [partial(step, index) for index in range(len(parts))]
        return self._closure(steps, optimizer, zero_grad, join=joined)

    def _closure(
        self,
        steps: Sequence[Callable[[], ClosureResult]],
        optimizer: Optimizer,
        zero_grad: Callable[[], None] | None,
        *,
        join: Callable[[Sequence[ClosureResult]], ClosureResult] | None,
    ) -> Closure:
        def backward(loss: Tensor, *, first: bool) -> Tensor:
            self._phase = "backward"
            if first and self._gradients is not None:
                self._gradients.hold()
            scaled = call._call_strategy_hook(self.trainer, "backward_part", loss, optimizer)
            self._phase = "forward"
            return scaled

        def after_backward(loss: Tensor) -> None:
            self._phase = "backward"
            if self._gradients is not None:
                self._gradients.add_back()
            call._call_strategy_hook(self.trainer, "after_backward", loss)

        def before_weights() -> None:
            if self._policy.recover and not self.trainer.fit_loop._should_accumulate():
                self._weights = (WeightsCopy if self._policy.optimizer_rollback else WeightsWatch)(optimizer)
                self._phase = "optimizer step"

        hooks = None if self._skip_backward else (backward, after_backward)
        return _MicroBatchClosure(steps, hooks, zero_grad, before_weights, join)


class _MicroBatchClosure(Closure):
    """Lightning's closure over several micro-batches, in its order: training_step, zero_grad, backward, then the next one."""

    def __init__(
        self,
        steps: Sequence[Callable[[], ClosureResult]],
        backward: tuple[Callable[..., Tensor], Callable[[Tensor], None]] | None,
        zero_grad: Callable[[], None] | None,
        done: Callable[[], None],
        join: Callable[[Sequence[ClosureResult]], ClosureResult] | None,
    ) -> None:
        super().__init__(step_fn=steps[0], backward_fn=None, zero_grad_fn=zero_grad)
        self._steps, self._backward, self._done, self._join = steps, backward, done, join

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        outputs: list[ClosureResult] = []
        scaled: Tensor | None = None
        for index, step in enumerate(self._steps):
            output = step()
            if index == 0 and self._zero_grad_fn is not None:
                self._zero_grad_fn()
            if output.closure_loss is not None and self._backward is not None:
                scaled = self._backward[0](output.closure_loss, first=scaled is None).detach()
            elif output.closure_loss is None and len(self._steps) == 1:
                self.warning_cache.warn(
                    "`training_step` returned `None`. If this was on purpose, ignore this warning..."
                )
            output.closure_loss = None  # the graph ends here, before the next micro-batch builds its own
            outputs.append(output)
        if scaled is not None and self._backward is not None:
            self._backward[1](scaled)
        result = outputs[0] if self._join is None else self._join(outputs)
        self._done()
        return result


class _Weighting:
    """The share of each micro-batch in its batch, by the loss's own number of terms.

    If the loss is a mean over terms (samples, tokens), the batch's loss and gradient are those of the micro-batches averaged
    by their numbers of terms. A module with `loss_reduction = "sum"` divides by the whole batch's totals itself, so its losses add.
    """

    def __init__(self, module: L.LightningModule, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        reduction = getattr(module, "loss_reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(
                f'{type(module).__name__}.loss_reduction is {reduction!r}; it must be "mean" or "sum".'
            )
        self._adds = reduction == "sum"
        weigh = getattr(module, "loss_weight", None)
        weights = list(sizes) if weigh is None or self._adds else _on_host([weigh(part) for part in parts])
        if min(weights) < 0 or not sum(weights):
            raise SplitError(
                f"{type(module).__name__}.loss_weight gave {weights}: numbers of loss terms, at least one of them positive, are needed."
            )
        self._weights = weights

    def apply(self, output: ClosureResult, index: int) -> ClosureResult:
        """Scale one micro-batch's loss to its share; a micro-batch without a loss term gives no loss and runs no backward."""
        if output.closure_loss is None or self._adds:
            return output
        if self._weights[index] == 0:
            output.closure_loss = output.loss = None
            return output
        scaled = output.closure_loss * (self._weights[index] / sum(self._weights))
        return ClosureResult(scaled, extra=output.extra)

    def join(self, outputs: Sequence[ClosureResult]) -> ClosureResult:
        """Return the whole batch's result: losses added (each is its share already), extras merged."""
        losses = [output.loss for output in outputs if output.loss is not None]
        if losses and len(losses) != sum(1 for weight in self._weights if weight):
            raise SplitError(
                "training_step returned None for some micro-batches of a batch and a loss for others, so the batch was not cut exactly; "
                "set `splittable = False` on the module to run its batches whole."
            )
        loss = torch.stack(losses).sum() if losses else None
        extra = merge([_detached(output.extra) for output in outputs], sizes=self._sizes, average=self.average)
        return ClosureResult(loss, extra=extra)

    def average(self, values: Sequence[Any], parts: Sequence[int] | None = None) -> Any:
        """Average one figure a micro-batch by loss weight; add them if the module's loss adds."""
        weights = self._weights if parts is None else [self._weights[part] for part in parts]
        pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        if not pairs:
            return values[-1]
        if self._adds:
            return sum(value for value, _ in pairs)
        return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _metrics_of(module: L.LightningModule) -> list[Metric]:
    return [metric for metric in module.modules() if isinstance(metric, Metric) and metric._defaults]


def _rows_if_any(batch: Any) -> int | None:
    """Return the rows of `batch`, or None for a batch that cannot be counted: it runs whole."""
    try:
        return num_rows(batch)
    except SplitError:
        return None


def _on_host(weights: list[Any]) -> list[float]:
    """Return numbers; weights given as tensors of a device are read in one transfer."""
    if any(isinstance(weight, Tensor) for weight in weights):
        return torch.stack([torch.as_tensor(weight).reshape(()) for weight in weights]).tolist()
    return weights


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_detached(entry) for entry in value)
    return value


def _micro_batch_unit(module: L.LightningModule) -> int:
    unit = getattr(module, "micro_batch_unit", 1)
    if isinstance(unit, bool) or not isinstance(unit, int) or unit < 1:
        raise ConfigurationError(
            f"{type(module).__name__}.micro_batch_unit is {unit!r}; it must be a positive number of rows."
        )
    return unit
