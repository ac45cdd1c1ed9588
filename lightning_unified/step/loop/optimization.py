"""The seam with Lightning: its automatic optimization, with micro-batches and recovery.

This is the one file that touches `_AutomaticOptimization`, a private class in
lightning/pytorch/loops/optimization/automatic.py (read in 2.6.6); tests/step/loop/test_seam.py pins its shape. Deviations
from Lightning's loop:

1. `run` prepares and plans the batch first, and repeats the step if memory ran out. Lightning runs it once.
2. The closure (`closure`) runs `training_step` and `backward` once a micro-batch, and merges their results. A strategy
   that split inside Lightning's own hooks would get the weights right, but callbacks would see the first micro-batch's
   outputs only.
3. Checkpoints of the loop also hold the micro-batch sizes, the findings of the exactness check, and the window's loss
   terms.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, RecomputationError
from lightning_unified.nn.cuda_graphs import gather_gradients, may_be_recorded
from lightning_unified.nn.second_run.runs import named_errors
from lightning_unified.step.device_gradients import DeviceGradientCheck
from lightning_unified.step.loop.attempt import Attempt
from lightning_unified.step.loop.checked_splitter import CheckedSplitter, ReweightedError
from lightning_unified.step.loop.closure import MicroBatchClosure, ZeroGrad, order_of_zeroing, overrides
from lightning_unified.step.loop.gradient_places import GradientPlaces
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.loop.split_batch import WholeBatch
from lightning_unified.step.loop.window import WindowTerms
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.oom import caught, insist
from lightning_unified.step.recovery.snapshot import StepSnapshot
from lightning_unified.step.split import BatchShape
from lightning_unified.step.undo import TRAINING_STEP, StateWatch, roots_of

__all__ = ["UnifiedOptimization", "draws_its_batches"]

_DRAWS_BATCHES = (
    "training_step(dataloader_iter) draws its own batches: they are not split, and a step that runs out of memory is not repeated. "
    "Write training_step(batch, batch_idx) to have them split."
)
_DRAWS_TERMS = (
    'window_mean="terms" counts the loss terms of each batch, and training_step(dataloader_iter) draws its batches itself; '
    'give window_mean="batches", or write training_step(batch, batch_idx).'
)


class UnifiedOptimization(_AutomaticOptimization):
    """Runs one optimization step: splits the batch, and repeats the step if memory runs out.

    Without a `planner` nothing is predicted.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, planner: StepPlanner | None = None) -> None:
        super().__init__(trainer)
        self._policy, self._planner = policy, planner
        self._state = StateWatch(partial(roots_of, trainer.lightning_module, trainer, TRAINING_STEP))
        self._generators = GeneratorWatch(trainer.strategy.root_device)
        self._batches = CheckedSplitter(
            trainer,
            policy,
            step=self._training_step,
            fits=_unknown if planner is None else planner.fits,
            metrics=lambda: self._state.named_metrics,
            note_check=_nothing if planner is None else planner.note_check,
        )
        self._device_check = DeviceGradientCheck(trainer, policy, step=self._training_step)
        self._window = WindowTerms() if policy.options.window_mean == "terms" else None
        self._attempt: Attempt | None = None  # None where steps are not repeated
        self._places, self._in_place = GradientPlaces(), False
        self._phase = "forward"

    def __getstate__(self) -> dict[str, Any]:
        """Return Lightning's own state, the policy and the window; the next fit makes a new loop."""
        kept = {*vars(_AutomaticOptimization(self.trainer)), "_policy", "_window"}
        return {name: value for name, value in vars(self).items() if name in kept}

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        window = None if self._window is None else self._window.state_dict()
        own = {"sizes": self._policy.sizing.state_dict(), "check": self._batches.check.state_dict(), "window": window}
        return {**super().on_save_checkpoint(), **own}

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._policy.sizing.load(state_dict.get("sizes"))
        self._batches.check.load_state_dict(state_dict.get("check"))
        if self._window is not None and (window := state_dict.get("window")) is not None:
            self._window.load_state_dict(window)

    def batch_moved(self, host: Any, moved: Any) -> None:
        """Let the exactness check read a batch on the host, before its transfer to the device."""
        self._batches.batch_moved(host, moved)

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run the batch; if memory runs out, repeat it in smaller micro-batches while any are left."""
        if draws_its_batches(kwargs):
            return self._run_unsplit(optimizer, batch_idx, kwargs)
        key = next(iter(kwargs))
        kwargs[key] = self._prepared(kwargs[key])
        shape = self._batches.splitter.shape(kwargs[key])
        self._plan_and_count(kwargs, shape, batch_idx=batch_idx)
        if self._policy.options.recover:
            outputs = self._run_and_recover(optimizer, batch_idx, kwargs, shape=shape)
        else:
            self._state.look()
            with named_errors():
                outputs = super().run(optimizer, batch_idx, kwargs)
        if self._window is not None:
            self._window.done()
        if self._in_place:
            self._places.pack(optimizer)
        self._policy.batch_done(shape)
        if self._planner is not None:
            self._planner.batch_done()
        return outputs

    def _plan_and_count(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None, *, batch_idx: int) -> None:
        """Plan for a new kind of batch, and count the loss terms that the batch adds to its window."""
        if self._planner is not None:
            self._planner.look(next(iter(kwargs.values())), shape, step=partial(self._step_on, kwargs))
        if self._window is not None:
            opens = batch_idx % self.trainer.accumulate_grad_batches == 0
            count = partial(self._batches.loss_terms, kwargs, shape, batch_idx=batch_idx)
            terms = insist(count, device=self._policy.watch.device)
            self._window.begin(terms, opens=opens, counted_by=self._batches.counted_by)

    def _run_unsplit(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run a step that draws its own batches, once and whole."""
        asked = self._policy.sizes.asked
        self._policy.notices.say_unsplit(_DRAWS_BATCHES, option="micro_batch_size", asked=asked)
        if self._window is not None:
            raise ConfigurationError(_DRAWS_TERMS)
        return super().run(optimizer, batch_idx, kwargs)

    def _step_on(self, kwargs: "OrderedDict[str, Any]", batch: Any) -> ClosureResult:
        return self._training_step(OrderedDict(kwargs, **{next(iter(kwargs)): batch}))

    def _run_and_recover(
        self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]", *, shape: BatchShape | None
    ) -> dict[str, Any]:
        key, failures = next(iter(kwargs)), 0
        within_window = batch_idx % self.trainer.accumulate_grad_batches != 0
        rollback = self._policy.options.optimizer_rollback
        while True:
            # recorded before each attempt: the policy may have changed the module, or made it free memory
            attempt = self._attempt = Attempt(
                self._snapshot(kwargs[key]),
                self._trained(optimizer),
                within_window=within_window,
                copies_weights=rollback,
            )
            self._policy.notices.say_copied(attempt.copied.bytes)
            self._phase = "forward"
            outputs = reason = None
            is_over, is_reweighted = True, False
            try:
                with named_errors(), attempt.renormed:
                    outputs, reason = self._run_attempt(partial(super().run, optimizer, batch_idx, OrderedDict(kwargs)))
            except RecomputationError as error:
                self._policy.leave_unrecomputed(error)
                is_over = False
            except ReweightedError:
                is_over, is_reweighted = False, True
            self._attempt = None
            if reason is None and is_over:
                break
            kwargs[key] = attempt.undo()
            self._say_written(attempt.written)
            del attempt
            if is_reweighted:
                self._plan_and_count(kwargs, shape, batch_idx=batch_idx)  # the new rule counts other terms
            if reason is not None:
                failures += 1
                self._change_for_next_attempt(reason, shape=shape, attempt=failures, batch=kwargs[key])
        self._state.learn(attempt.snapshot.state)
        assert outputs is not None
        return outputs

    def _say_written(self, parameters: Sequence[Tensor]) -> None:
        """Warn of trained parameters that an undone attempt had written, and that nothing restores."""
        named = self.trainer.lightning_module.named_parameters()
        written = {id(one) for one in parameters}
        self._policy.notices.say_rewritten([name for name, one in named if id(one) in written] if written else ())

    def _run_attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        """Return the outputs and None, or None and the reason why the batch must be repeated."""
        return caught(run)

    def _change_for_next_attempt(self, reason: str, *, shape: BatchShape | None, attempt: int, batch: Any) -> None:
        """Change the policy for the next attempt, after failure number `attempt` of this batch."""
        self._policy.out_of_memory(phase=self._phase, reason=reason, shape=shape, attempt=attempt, batch=batch)

    def _snapshot(self, batch: Any) -> StepSnapshot:
        results = self.trainer.fit_loop.epoch_loop._results
        return StepSnapshot(self.trainer, state=self._state, generators=self._generators, results=results, batch=batch)

    def _prepared(self, batch: Any) -> Any:
        """Return the whole batch after the rule `prepare`; a repeated step reuses it."""
        prepare = self._policy.batches.of("fit").prepare
        if prepare is None:
            return batch
        call = partial(_without_gradients, self.trainer, prepare, batch)
        return self._policy.retried(call, phase="prepare", begin=lambda: self._snapshot(batch).undo)

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        if draws_its_batches(kwargs):
            return MicroBatchClosure(self, WholeBatch(self._make_step_fn(kwargs)), optimizer, zero_grad)
        batch = self._batches.split(kwargs, self._make_step_fn(kwargs), batch_idx=batch_idx)
        self._device_check.compare(kwargs, is_split=batch.count > 1)
        return MicroBatchClosure(self, batch, optimizer, zero_grad)

    def backward_micro_batch(
        self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool, kept: Sequence[Tensor]
    ) -> Tensor:
        """Run one micro-batch's backward pass, with the window's earlier gradients set aside."""
        self._phase = "backward"
        if first and self._attempt is not None:
            self._attempt.gradients.hold()
        if first:
            self._places.give()
        if self._window is not None:
            share = self._window.share(share, nominal=self.trainer.accumulate_grad_batches)
        leaves = self.leaves() if first else ()
        arguments = (loss, optimizer, share, first, leaves, kept)
        scaled = call._call_strategy_hook(self.trainer, "backward_micro_batch", *arguments)
        self._places.settle()
        gather_gradients(self.trainer.lightning_module)
        self._phase = "forward"
        return scaled

    def zeroing(self, zero_grad: Callable[[], None] | None, *, micro_batches: int) -> ZeroGrad | None:
        """Return the object that zeroes gradients; None if the batch opens no accumulation window."""
        attempt = self._attempt
        keeps = attempt is not None and not attempt.zeroing  # once, if an optimizer runs its closure again
        self._places.forget()
        self._in_place = zero_grad is not None and self._keeps_places(micro_batches)
        if zero_grad is not None and self._in_place:
            trained = [one for optimizer in self.trainer.optimizers for one in self._trained(optimizer)]
            zero_grad = partial(self._places.zero, zero_grad, trained)
        zeroing = order_of_zeroing(
            zero_grad, self.trainer, leaves=self.leaves(), micro_batches=micro_batches, keeps=keeps
        )
        if attempt is not None and zeroing is not None:
            attempt.zeroing.append(zeroing)
        return zeroing

    def _keeps_places(self, micro_batches: int) -> bool:
        """Return whether the gradients of a batch keep their memory over `zero_grad`.

        They do in segments that expand, unless a user's hook sees `zero_grad`, recordings have a gradient buffer, or further batches of a
        window make their gradients apart.
        """
        splits_alone = micro_batches > 1 and self.trainer.accumulate_grad_batches == 1
        if not (splits_alone and self._policy.watch.expands) or overrides(self.trainer, "on_before_zero_grad"):
            return False
        return not may_be_recorded(self.trainer.lightning_module)

    def leaves(self) -> Sequence[Tensor]:
        """Return the tensors that get gradients, besides the optimizers' parameters."""
        return self._state.look() if self._attempt is None else self._attempt.snapshot.state.leaves

    def has_terms(self) -> bool:
        """Return whether the batch has loss terms that count in its window."""
        return self._window is None or self._window.factor > 0

    def after_backward(self, loss: Tensor | None, optimizer: Optimizer) -> None:
        """Run the hooks after a batch's last backward pass, on the window's gradients so far.

        `loss` is that of the last backward pass; None if there was none.
        """
        if loss is not None or self._closes_window:
            self._phase = "backward"
            if self._attempt is not None:
                self._attempt.gradients.add_back(hold_first=loss is None)
        self._finish_gradients(optimizer)
        if loss is not None:
            self.trainer.strategy.after_backward(loss)  # pyright: ignore[reportAttributeAccessIssue]

    def _finish_gradients(self, optimizer: Optimizer) -> None:
        """Turn the summed gradients into those of the optimizer, after the window's last backward."""
        if self._window is not None and self._closes_window:
            self._window.divide(self._trained(optimizer))

    def _trained(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters whose gradients a backward pass writes: those of the optimizer."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    @property
    def _closes_window(self) -> bool:
        """Whether weights are written after this batch."""
        return not self.trainer.fit_loop._should_accumulate()

    def before_weights(self, optimizer: Optimizer) -> None:
        """Record weights and optimizer state before they are written."""
        if self._attempt is not None and self._closes_window:
            self._attempt.before_weights(optimizer)
            self._phase = "optimizer step"


def _without_gradients(trainer: L.Trainer, prepare: Callable[[Any], Any], batch: Any) -> Any:
    with torch.no_grad(), trainer.precision_plugin.train_step_context():
        return prepare(batch)


def _nothing() -> None:
    """Do nothing."""


def _unknown(_rows: int) -> None:
    """Return None: without a planner, it is not predicted how many rows fit."""


def draws_its_batches(kwargs: "OrderedDict[str, Any]") -> bool:
    """Return whether `kwargs` are the arguments of `training_step(dataloader_iter)`.

    Source:
        training_epoch_loop.py (Lightning 2.6.6).
    """
    return "any" in kwargs and len(kwargs) == 1
