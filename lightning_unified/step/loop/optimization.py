"""The seam with Lightning: its automatic optimization, run as micro-batches and repeated smaller when memory runs out.

This is the one file that touches `_AutomaticOptimization`, private in lightning/pytorch/loops/optimization/automatic.py (read in
2.6.6); tests/step/test_seam.py pins its shape. A closure of our own is needed because Lightning's freezes the result of
`training_step` before `backward`: a strategy that splits inside these hooks gets the weights right, but callbacks see the first
micro-batch's outputs only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, HalfUpdatedError, SplitError
from lightning_unified.step.device_gradients import DeviceGradientCheck
from lightning_unified.step.encoders import encoders_of
from lightning_unified.step.exactness.check import ExactnessCheck
from lightning_unified.step.exactness.verdict import batch_norms_of
from lightning_unified.step.exactness.weighting import Weighting
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.loop.split_batch import SplitBatch, SplitResults, WholeBatch
from lightning_unified.step.loop.window import WindowTerms
from lightning_unified.step.loop.zero_grad import LateZeroGrad, ZeroGrad, overrides
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.oom import caught, insist
from lightning_unified.step.recovery.snapshot import HeldGradients, StepSnapshot
from lightning_unified.step.recovery.weights import WeightsCopy, WeightsWatch
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.split import BatchShape
from lightning_unified.step.undo import TRAINING_STEP, BatchWatch, StateWatch, roots_of

__all__ = ["UnifiedOptimization"]


class UnifiedOptimization(_AutomaticOptimization):
    """One optimization step of a batch: cut as the strategy says, exact, and repeated smaller after an out-of-memory error.

    Args:
        trainer: The Trainer whose batches are run.
        policy: How to cut and what to do when memory runs out.
        foresight: What plans for a batch before it runs; None where nothing is predicted.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, planner: StepPlanner | None = None) -> None:
        super().__init__(trainer)
        module = trainer.lightning_module
        self._policy, self._planner = policy, planner
        self._rules = policy.rules("fit")
        self._splitter = policy.splitter("fit")
        self._encoders = encoders_of(trainer, policy, "fit")
        self._state = StateWatch(partial(roots_of, module, trainer, TRAINING_STEP))
        self._written = StateWatch(partial(roots_of, module, trainer, TRAINING_STEP))
        self._generators = GeneratorWatch(trainer.strategy.root_device)
        self._check = ExactnessCheck(
            trainer, rules=self._rules, splitter=self._splitter, step=self._training_step, fits=self._fits
        )
        self._parity = DeviceGradientCheck(trainer, policy, splitter=self._splitter, step=self._training_step)
        self._window = WindowTerms() if policy.mean_of_terms else None
        self._gradients: HeldGradients | None = None
        self._weights: WeightsWatch | WeightsCopy | None = None
        self._zeroing: ZeroGrad | None = None
        self._phase = "forward"
        self._batch_idx = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps: Lightning's own state. The next fit makes a new loop from the strategy."""
        kept = {*vars(_AutomaticOptimization(self.trainer)), "_policy", "_window"}
        return {name: value for name, value in vars(self).items() if name in kept}

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        window = None if self._window is None else self._window.state_dict()
        own = {"sizes": self._policy.sizes_state(), "check": self._check.state_dict(), "window": window}
        return {**super().on_save_checkpoint(), **own}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._policy.load_sizes_state(state_dict.get("sizes"))
        self._check.load_state_dict(state_dict.get("check"))
        if self._window is not None:
            self._window.load_state_dict(state_dict.get("window") or [])

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run the batch, and again in smaller parts for as long as memory runs out and a smaller part is possible."""
        self._batch_idx = batch_idx
        if _draws_its_batches(kwargs):
            return self._run_unsplit(optimizer, batch_idx, kwargs)
        key = next(iter(kwargs))
        kwargs[key] = self._prepared(kwargs[key])
        shape = self._splitter.shape(kwargs[key])
        if self._planner is not None:
            self._planner.look(kwargs[key], shape, step=partial(self._step_on, kwargs))
        if self._window is not None:
            opens = batch_idx % self.trainer.accumulate_grad_batches == 0
            terms = insist(lambda: self._terms(kwargs, shape), device=self._policy.watch.device)
            self._window.begin(terms, opens=opens)
        if self._policy.recover:
            outputs = self._run_and_recover(optimizer, batch_idx, kwargs, shape=shape)
        else:
            self._state.look()
            outputs = super().run(optimizer, batch_idx, kwargs)
        if self._window is not None:
            self._window.done()
        self._policy.batch_done(shape)
        if self._planner is not None:
            self._planner.batch_done()
        return outputs

    def _run_unsplit(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run a step that draws its own batches, once and whole."""
        self._policy.note_unsplit(
            "micro_batch_size",
            "training_step(dataloader_iter) draws its own batches: they are not split, and a step that runs out of memory is not repeated. "
            "Write training_step(batch, batch_idx) to have them split.",
        )
        if self._window is not None:
            raise ConfigurationError(
                'window_mean="terms" counts the loss terms of each batch, and training_step(dataloader_iter) draws its batches itself; '
                'give window_mean="batches", or write training_step(batch, batch_idx).'
            )
        try:
            return super().run(optimizer, batch_idx, kwargs)
        finally:
            self._weights = None

    def _step_on(self, kwargs: "OrderedDict[str, Any]", batch: Any) -> ClosureResult:
        return self._training_step(OrderedDict(kwargs, **{next(iter(kwargs)): batch}))

    def _run_and_recover(
        self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]", *, shape: BatchShape | None
    ) -> dict[str, Any]:
        key, attempt = next(iter(kwargs)), 0
        while (
            True
        ):  # noted anew before each attempt, for the policy may have changed the module, or had it give memory back
            snapshot, batch = self._snapshot(), BatchWatch(kwargs[key])
            continues = batch_idx % self.trainer.accumulate_grad_batches != 0
            self._gradients = HeldGradients(optimizer, within_window=continues)
            self._weights, self._phase = None, "forward"
            outputs, reason = self._attempt(partial(super().run, optimizer, batch_idx, OrderedDict(kwargs)))
            if reason is None:
                break
            attempt += 1
            self._step_back(snapshot)
            kwargs[key] = batch.again()
            del snapshot, batch
            self._policy.out_of_memory(
                phase=self._phase, reason=reason, shape=shape, attempt=attempt, batch=kwargs[key]
            )
        self._gradients = self._weights = None
        self._state.learn(snapshot.state)
        assert outputs is not None
        return outputs

    def _attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        """Return the outputs and None, or None and why memory ran out."""
        return caught(run)

    def _snapshot(self) -> StepSnapshot:
        results = self.trainer.fit_loop.epoch_loop._results
        return StepSnapshot(self.trainer, state=self._state, generators=self._generators, results=results)

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
        if self._zeroing is not None:
            self._zeroing.undo()
        self._gradients = self._zeroing = None
        snapshot.restore()
        self._state.forget()

    def _prepared(self, batch: Any) -> Any:
        """Return what the rule `prepare` makes of the whole batch; a repeated step reuses it."""
        prepare = self._rules.prepare
        if prepare is None:
            return batch

        def call(batch: Any) -> Any:
            with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
                return prepare(batch)

        if not self._policy.recover:
            return call(batch)
        attempt = 0
        while True:
            snapshot, watch = self._snapshot(), BatchWatch(batch)
            prepared, reason = caught(partial(call, batch))
            if reason is None:
                return prepared
            attempt += 1
            snapshot.restore()
            self._state.forget()
            batch = watch.again()
            del snapshot, watch
            self._policy.out_of_memory(phase="prepare", reason=reason, shape=None, attempt=attempt)

    def _terms(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None) -> float:
        """Return by how many loss terms this batch counts in its window."""
        rules, batch = self._rules, next(iter(kwargs.values()))
        declared = rules.loss_weight is not None
        if rules.loss_is_sum and not declared:
            raise ConfigurationError(
                f'window_mean="terms" needs the number of loss terms of a batch, and the rules of {type(self.trainer.lightning_module).__name__} '
                '(loss_is_sum=True) do not say it: give loss_weight as well, or leave window_mean="batches".'
            )
        if shape is None and not declared:
            return 1.0
        rows = 1 if shape is None else shape.rows
        splits = self._encoders is None and rules.splittable and not declared
        splits = splits and rows >= 2 * self._policy.sizes.unit and self._splitter.refusal(batch, rows) is None
        if shape is not None and splits:
            self._checked(kwargs, shape)
        rule = replace(self._policy.loss_rule, adds=False)
        return Weighting(rule, [batch], [rows], zero_by_rows=False).terms

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        if _draws_its_batches(kwargs):
            return _MicroBatchClosure(self, WholeBatch(self._make_step_fn(kwargs)), optimizer, zero_grad)
        batch = self._cut(kwargs)
        self._parity.look(kwargs, cut=batch.parts > 1)
        return _MicroBatchClosure(self, batch, optimizer, zero_grad)

    def _cut(self, kwargs: "OrderedDict[str, Any]") -> "WholeBatch | SplitBatch":
        """Return the batch as it is to run: whole, if it fits and where nothing can be counted that could be cut."""
        key = next(iter(kwargs))
        batch, whole = kwargs[key], WholeBatch(self._make_step_fn(kwargs))
        shape = None if self._policy.sizes.runs_whole else self._splitter.require_shape(batch)
        if shape is None:
            return whole
        sizes = self._policy.sizes.parts(shape)
        if len(sizes) == 1:
            return whole
        self._policy.allow_split(shape)
        if self._encoders is not None:
            most = self._policy.most_chunks
            return WholeBatch(partial(self._encoders.run, self._make_step_fn(kwargs), rows=max(sizes), most=most))
        try:
            self._splitter.require_rows(batch, shape.rows)
            self._checked(kwargs, shape)
        except SplitError as refusal:
            if self._policy.runs_whole(refusal):
                return whole
            raise
        if overrides(self.trainer, "on_before_backward"):
            self._policy.say_once_a_part(
                "the hook on_before_backward runs",
                "What it logs is merged; keep other state of losses in on_train_batch_end.",
            )
        parts = self._splitter.micro_batches(batch, sizes)
        return SplitBatch(
            [partial(self._training_step, OrderedDict(kwargs, **{key: part})) for part in parts],
            Weighting(self._policy.loss_rule, parts, sizes),
            merging=SplitResults(
                self._check.tables,
                results=self.trainer.fit_loop.epoch_loop._results,
                metrics=self._state.named_metrics,
                state=self._written if self._policy.check_split else None,
                ignored=batch_norms_of(self.trainer.lightning_module),
                learn=partial(self._learn_more, kwargs, shape),
            ),
            parameters=list(self.trainer.lightning_module.parameters()),
        )

    def _checked(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape) -> None:
        """Find by what micro-batches are weighted and how their results are put together; raise if nothing is exact."""
        if not self._policy.check_split:
            return
        sizes = self._policy.sizes
        verdict = self._check.verdict(
            kwargs, rows=shape.rows, unit=sizes.unit, at_once=sizes.at_once(shape), batch_idx=self._batch_idx
        )
        self._policy.split_checked(verdict)

    def _learn_more(
        self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, table: MergeTable, paths: Sequence[str]
    ) -> None:
        """Check a batch whose step returned or logged what no check has seen, before its update; say what nothing puts together."""
        if self._policy.check_split:
            sizes = self._policy.sizes
            verdict = self._check.learn_more(
                kwargs, table, paths, rows=shape.rows, unit=sizes.unit, at_once=sizes.at_once(shape)
            )
            self._policy.split_checked(verdict)

    def _fits(self, rows: int) -> bool | None:
        """Return whether so many rows are predicted to fit at once; None where nothing is predicted."""
        return None if self._planner is None else self._planner.fits(rows)

    def backward_part(self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool) -> Tensor:
        """Run one micro-batch's backward; the gradients of earlier batches of a window are out of its way."""
        self._phase = "backward"
        if first and self._gradients is not None:
            self._gradients.hold()
        if self._window is not None:
            # Lightning has divided the loss by the window's nominal number of batches
            share = (1.0 if share is None else share) * self._window.factor * self.trainer.accumulate_grad_batches
        scaled = call._call_strategy_hook(self.trainer, "backward_part", loss, optimizer, share)
        self._phase = "forward"
        return scaled

    def zeroing(self, zero_grad: Callable[[], None] | None, *, parts: int) -> ZeroGrad | None:
        """Return what zeroes gradients in a batch of `parts` micro-batches; None within an accumulation window."""
        self._zeroing = None if zero_grad is None else ZeroGrad(zero_grad)
        if zero_grad is not None and parts > 1 and overrides(self.trainer, "on_before_zero_grad"):
            self._zeroing = LateZeroGrad(zero_grad, self.trainer.lightning_module.parameters())
        return self._zeroing

    def has_terms(self) -> bool:
        """Return whether the batch counts in its window at all."""
        return self._window is None or self._window.factor > 0

    def after_backward(self, loss: Tensor | None, optimizer: Optimizer) -> None:
        """Run what follows a batch's last backward, on the gradients of the window so far.

        Args:
            loss: What was differentiated last; None if nothing was.
            optimizer: Whose gradients they are.
        """
        if loss is not None or self._closes_window:
            self._phase = "backward"
            if self._gradients is not None:
                if loss is None:
                    self._gradients.hold()
                self._gradients.add_back()
        self._finish_gradients(optimizer)
        if loss is not None:
            self.trainer.strategy.after_backward(loss)  # pyright: ignore[reportAttributeAccessIssue]

    def _finish_gradients(self, optimizer: Optimizer) -> None:
        """Make the sum in the gradients what the optimizer is to see, once the window's last backward is over."""
        if self._window is not None and self._closes_window:
            self._window.divide(parameter for group in optimizer.param_groups for parameter in group["params"])

    @property
    def _closes_window(self) -> bool:
        """Whether weights are written after this batch."""
        return not self.trainer.fit_loop._should_accumulate()

    def before_weights(self, optimizer: Optimizer) -> None:
        """Note weights and optimizer state before they are written; an optimizer that runs its closure again has written already."""
        if self._policy.recover and self._closes_window:
            if self._weights is None:
                self._weights = (WeightsCopy if self._policy.optimizer_rollback else WeightsWatch)(optimizer)
            self._phase = "optimizer step"


def _draws_its_batches(kwargs: "OrderedDict[str, Any]") -> bool:
    """Return whether these are the arguments of `training_step(dataloader_iter)` (training_epoch_loop.py, Lightning 2.6.6)."""
    return "any" in kwargs and len(kwargs) == 1


class _MicroBatchClosure(Closure):
    """Lightning's closure over several micro-batches, each in its order: training_step, zero_grad once a batch, backward."""

    def __init__(
        self,
        loop: UnifiedOptimization,
        batch: WholeBatch | SplitBatch,
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
        zeroing, last = loop.zeroing(self._zero_grad_fn, parts=batch.parts), batch.parts - 1
        batch.begin()
        for index in range(batch.parts):
            output = batch.step(index, in_window=self._zero_grad_fn is None)
            batch.end_part()
            if zeroing is not None:
                zeroing.after_step(first=index == 0, last=index == last, settle=batch.settle)
            if output.closure_loss is not None and not loop._skip_backward and loop.has_terms():
                with batch.recording():
                    scaled = loop.backward_part(
                        output.closure_loss, self._optimizer, share=batch.share(index), first=scaled is None
                    ).detach()
            output.closure_loss = None  # the graph ends here, before the next micro-batch builds its own
            outputs.append(output)
        batch.settle()  # hooks after backward may read what was logged and written
        loop.after_backward(scaled, self._optimizer)
        result = batch.join(outputs)
        if result.loss is None:
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        loop.before_weights(self._optimizer)
        return result
