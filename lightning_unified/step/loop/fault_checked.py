"""The optimization loop on Metal, which checks each step for silent GPU faults.

Not run on hardware.

When the canary and the runtime's messages are read (`step.faults`), and why then:

| when | what follows a fault | cost |
|---|---|---|
| after a batch's last backward pass, before the optimizer writes | the batch is undone and repeated | the host waits for the device |
| at the start of the next batch, once its state is copied, before a validation, before a checkpoint is written, at the end of the fit | the weights or the copies may be garbage: the run stops, and no checkpoint is written | at the start of a batch little: the batch's blocking copy to the device has just waited (aten/src/ATen/native/mps/operations/Copy.mm, torch 2.13) |
| before copies of state are written back, after a trial run of the step | the trial is repeated, with the batch's attempt if it is part of one | one wait for each trial |
| with `optimizer_rollback=True`, right after the optimizer's kernels | weights are copied back, and the batch is repeated | one more wait |
| whenever a step raises an error | as above, if there was a fault: garbage leads to index errors, refused splits and failed checks | |

The wait after the copies puts them in another command buffer than the step: a fault in the step cannot take them.

The first reading cannot come later. The weights must not be written from garbage, and nothing on the device can hold the optimizer back
for all optimizers. Where the loss is read each step anyway, its own wait comes right after and finds the device idle.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import GpuFaultError, LightningUnifiedError
from lightning_unified.step.exactness.verdict import Verdict
from lightning_unified.step.faults import FaultWatch
from lightning_unified.step.loop.optimization import UnifiedOptimization, draws_its_batches
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.policy.gpu_faults import shorten_command_buffers
from lightning_unified.step.recovery.snapshot import StateCopies
from lightning_unified.step.split import BatchShape
from lightning_unified.units import format_rows

__all__ = ["FaultCheckedOptimization"]

log = logging.getLogger("lightning_unified")

T = TypeVar("T")

# Judgement: a batch is repeated four times. Each repetition halves the micro-batches, so that the last one has command buffers of a
# sixteenth of the length. A fault that survives this does not come from their length.
_REPETITIONS = 4
_SAVED = "gpu_fault.ckpt"

_WEIGHTS = (
    "the GPU lost work between two steps ({found}), so the weights may be garbage; the run stops here, and no checkpoint of them is written. "
    "Resume from the last checkpoint; with optimizer_rollback=True the step is repeated instead."
)
_PERSISTS = (
    "the GPU lost work of the same batch {count} times in a row, the last time in micro-batches of {rows} ({found}). The weights are those "
    "before this batch{saved}. Let the display sleep or close programs that use the GPU, restart the Mac if it stays, and resume."
)

_UNREPEATED = (
    "the GPU lost work of a batch ({found}), and batches are not repeated here (recover=False, or a training_step that draws its batches). "
    "Its weights are not written. Resume from the last checkpoint, with recover=True and training_step(batch, batch_idx)."
)


class _LostError(LightningUnifiedError):
    """The device lost work of this attempt."""


class _CheckedCopies(StateCopies):
    """Looks for lost GPU work after the state is copied, and before the copies are written back.

    Lost copies cannot restore the state. While an attempt at the batch runs, the attempt's own copies, made earlier, can: the loss is
    noted, and the attempt is undone. Otherwise the run stops. Evaluations are never repeated, so nothing is looked for there.
    """

    def __init__(self, loop: "FaultCheckedOptimization", faults: FaultWatch) -> None:
        self._loop, self._faults = loop, faults

    @override
    def made(self) -> None:
        if self._loop.is_repeatable:
            self._faults.note()
        elif self._loop.trainer.training:
            self._loop.settle()

    @override
    def needed(self) -> None:
        if self._loop.trainer.training:
            self._faults.note()

    @override
    def restored(self) -> None:
        self._faults.canary.mark()


class FaultCheckedOptimization(UnifiedOptimization):
    """Runs one optimization step, and repeats it if the GPU lost work of it without an error.

    From the first fault on, the host waits for the device after each forward and each backward pass, so that a command buffer holds one
    of them at most.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, planner: StepPlanner | None = None) -> None:
        super().__init__(trainer, policy, planner=planner)
        device, machine = trainer.strategy.root_device, policy.watch.machine
        self._faults = FaultWatch(trainer.lightning_module, trainer.optimizers, device=device, machine=machine)
        self._batches.before_refusal = self._require_whole
        self.state_copies = _CheckedCopies(self, self._faults)
        self._found: str | None = None
        self._repeated = 0
        self._is_shortened = self._has_evaluated = False

    def close(self) -> None:
        """Remove all hooks, at the end of the fit."""
        self._faults.close()

    def settle(self, *, before_evaluation: bool = False) -> None:
        """Raise `GpuFaultError` if the device has lost work since the last gradient was complete.

        A mere message after an evaluation is the evaluation's, and is reported.
        """
        found, is_missing = self._faults.look()
        evaluated, self._has_evaluated = self._has_evaluated, before_evaluation
        if found is not None and evaluated and not is_missing:
            self._policy.events.append(f"the GPU lost work of an evaluation ({found}); its results may be wrong")
            log.warning("%s", self._policy.events[-1])
        elif found is not None:
            raise GpuFaultError(_WEIGHTS.format(found=found))

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        self.settle()
        return super().on_save_checkpoint()

    @property
    def is_repeatable(self) -> bool:
        """Whether an attempt is running, with copies of the state before it."""
        return self._attempt is not None

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        if not self._policy.options.recover or draws_its_batches(kwargs):
            self.settle()  # elsewhere it comes with the copies of the state
        self._repeated = 0
        try:
            return super().run(optimizer, batch_idx, kwargs)
        except _LostError as lost:  # with recover=False, or where the step draws its batches
            found = str(lost)
        finally:
            self._faults.canary.is_active = False
        raise GpuFaultError(_UNREPEATED.format(found=found))

    @override
    def _prepared(self, batch: Any) -> Any:
        if self._policy.batches.of("fit").prepare is None:
            return batch
        while True:
            snapshot = self._snapshot(batch)
            prepared, self._found = self._called(
                lambda batch=batch: super(FaultCheckedOptimization, self)._prepared(batch)
            )
            if self._found is None:
                return prepared
            batch = snapshot.undo()
            self._change_for_next_attempt(self._found, shape=None, attempt=0, batch=None)

    @override
    def _plan_and_count(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None, *, batch_idx: int) -> None:
        plan_and_count = partial(super()._plan_and_count, kwargs, shape, batch_idx=batch_idx)
        while True:
            verdict = self._policy.splits.verdict
            _, self._found = self._called(plan_and_count, reads=self._window is not None)
            if self._found is None:
                return
            self._forget_since(verdict)
            self._change_for_next_attempt(self._found, shape=shape, attempt=0, batch=None)

    def _called(self, call: Callable[[], T], *, reads: bool = True) -> tuple[T | None, str | None]:
        """Return the result of work before a batch's attempts, and the fault if the GPU lost some.

        The fault is a text.

        Without `reads`, the result depends on the device only by trial runs, which note what was lost.
        """
        self._faults.canary.is_active = True
        try:
            result = call()
        except GpuFaultError:
            raise
        except Exception:
            found, _ = self._faults.found()
            if found is None or not self._policy.options.recover:
                raise
            return None, found
        found, _ = self._faults.found() if reads else self._faults.take_noted()
        if found is not None and not self._policy.options.recover:
            raise _LostError(found)
        return result, found

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        self._faults.canary.is_active = True
        return super()._make_closure(kwargs, optimizer, batch_idx)

    @override
    def _run_attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        verdict = self._policy.splits.verdict
        try:
            outputs, reason = super()._run_attempt(run)
            if reason is not None or (self._closes_window and self._policy.options.optimizer_rollback):
                self._require_whole()
        except _LostError as lost:
            self._found = str(lost)
        except Exception:
            self._found, _ = self._faults.found()
            if self._found is None:
                raise
        else:
            return outputs, reason
        if self._phase == "optimizer step" and not self._policy.options.optimizer_rollback:
            raise GpuFaultError(_WEIGHTS.format(found=self._found))
        self._forget_since(verdict)
        return None, self._found

    def _forget_since(self, verdict: Verdict | None) -> None:
        """Forget a verdict on splitting that is newer than `verdict`: a check compared garbage."""
        if self._policy.splits.verdict is not verdict:
            self._policy.splits.verdict = verdict
            self._batches.forget_check()

    @override
    def _change_for_next_attempt(self, reason: str, *, shape: BatchShape | None, attempt: int, batch: Any) -> None:
        found, self._found = self._found, None
        if found is None:
            super()._change_for_next_attempt(reason, shape=shape, attempt=attempt, batch=batch)
            return
        self._repeated += 1
        if self._repeated > _REPETITIONS:
            rows = "unknown size" if shape is None else format_rows(self._policy.sizes.micro_batch_size(shape))
            text = _PERSISTS.format(count=self._repeated, rows=rows, found=found, saved=self._save())
            raise GpuFaultError(text)
        self._is_shortened = True
        shorten_command_buffers(self._policy, shape, phase=self._phase, found=found)

    @override
    def backward_micro_batch(
        self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool, kept: Sequence[Tensor]
    ) -> Tensor:
        self._end_pass()
        scaled = super().backward_micro_batch(loss, optimizer, share=share, first=first, kept=kept)
        self._end_pass()
        return scaled

    @override
    def before_weights(self, optimizer: Optimizer) -> None:
        self._require_whole()
        super().before_weights(optimizer)
        self._faults.canary.mark()

    def _end_pass(self) -> None:
        self._faults.canary.mark()
        if self._is_shortened:
            self._faults.wait()

    def _require_whole(self) -> None:
        found, _ = self._faults.found()
        if found is not None:
            raise _LostError(found)

    def _save(self) -> str:
        """Save the state before this batch; return in words where it is.

        A fault while it is written takes the file back: the copies to the host may have been lost.
        """
        path = f"{str(self.trainer.default_root_dir).rstrip('/')}/{_SAVED}"
        try:
            self.trainer.save_checkpoint(path)
            self.settle()
        except GpuFaultError:
            if "://" not in path:
                Path(path).unlink(missing_ok=True)
            return "; they could not be saved, because the GPU lost work of that too"
        return f", and {path} holds them"
