"""The public interface of a unified strategy for callbacks, modules and users."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy

from lightning_unified.cost_model import Plan
from lightning_unified.files.status import RunFigures
from lightning_unified.hardware import Budget, Cap, Figure, Reading
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.planner.first_batch.first_step import FirstStep
from lightning_unified.precision import PrecisionChoice, plugin_precision
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.sizes import MicroBatchSize

__all__ = ["RunInterface"]


class RunInterface(Strategy):
    """The public properties and methods of a unified strategy, except Lightning's hooks."""

    policy: MemoryPolicy
    first_step: FirstStep | None
    precision_choice: PrecisionChoice | None

    @property
    def plan(self) -> Plan:
        """The settings of the run and the reason for each, as far as they are known by now."""
        policy, first, choice = self.policy, self.first_step, self.precision_choice
        watch, recomputation, applied = policy.watch, policy.recomputation, policy.applied_options
        assert watch.budget is not None, "the plan exists once fit has begun"
        return Plan(
            micro_batch_size=self.micro_batch_size,
            recompute=recomputation.on,
            recomputed="" if recomputation.policy is None else str(recomputation.policy),
            optimizer_kernel=applied.optimizer_kernel,
            loss_chunk=applied.loss_chunk,
            attention=applied.attention,
            prediction=None if first is None else first.memory.prediction,
            predicted_peak_bytes=None if first is None else first.memory.peak_bytes,
            alternatives=() if first is None else first.planning.alternatives,
            precision=plugin_precision(self.precision_plugin),
            budget_bytes=watch.budget.bytes,
            reasons={
                "budget": watch.budget.reason,
                "micro_batch_size": policy.sizing.reason,
                "recompute": recomputation.reason,
                "compile": policy.compilation.reason,
                "prediction": "not asked for" if first is None else first.planning.reason,
                **({} if first is None else first.reasons),
                **applied.reasons,
                "precision": choice.reason if choice is not None else "Lightning's default",
                "loss_weight": policy.splits.reason,
                "cap": watch.named(watch.cap.reason) if watch.cap is not None else "none",
                **({"segments": "expandable"} if watch.expands else {}),
                **({} if watch.written is None else {"allocator_settings": watch.named(watch.written.reason)}),
            },
        )

    def run_figures(self) -> RunFigures:
        """Return the figures of this run that `lightning-unified watch` shows.

        Reading the loss waits for the last batch, once every two seconds.
        """
        module, reading, peak = self.lightning_module, self.reading(), self.measured_peak()
        assert module is not None
        root, rows = str(module.trainer.default_root_dir), self.effective_batch_size
        return RunFigures(
            directory=root if "://" in root else str(Path(root).absolute()),
            module=type(module).__name__,
            device=self.told_device,
            step=module.trainer.global_step,
            total_steps=_total_steps(module.trainer),
            loss=_logged_loss(module.trainer),
            effective_batch_size=None if rows is None else rows * module.trainer.world_size,
            micro_batch_size=self.micro_batch_size,
            allocated_bytes=reading.allocated.bytes,
            reserved_bytes=reading.reserved.bytes,
            peak_bytes=peak.bytes,
            peak_source=peak.source,
            budget_bytes=None if self.budget is None else self.budget.bytes,
            recoveries=self.recoveries,
            rank=module.trainer.global_rank,
            ranks=module.trainer.world_size,
            run=_name_of_run(os.environ) if module.trainer.world_size > 1 else None,
        )

    def reading(self) -> Reading:
        """Return the counters of the device's pool. Never waits for the device."""
        return self.policy.watch.reading()

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and the counter it comes from."""
        return self.policy.watch.measured_peak()

    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch from the next batch on; return whether it could be done.

        See `MicroBatchSizing.shrink`.
        """
        return self.policy.sizing.shrink(reason)

    def grow(self, reason: str) -> bool:
        """Undo one halving by `shrink`; return whether there was one."""
        return self.policy.sizing.grow(reason)

    @property
    def spare_bytes(self) -> int | None:
        """Bytes of the budget beside the planned steps, which the module may keep between steps.

        A module that keeps memory reports it as `kept_bytes` and frees it in `give_back()`. The strategy calls that
        before it plans a step, and when memory is short. Once memory was short, `spare_bytes` is 0. None if steps are
        neither planned nor repeated.
        """
        if self.policy.kept.is_refused:
            return 0
        return (
            None if self.first_step is None or not self.policy.options.recover else self.first_step.memory.spare_bytes
        )

    def feel_pressure(self, pressed: bool) -> None:
        """Record whether the system warns that memory is short. Caches are then cleared earlier."""
        self.policy.caches.pressed = pressed

    @property
    def simulated(self) -> SimulatedMachine | None:
        """The simulated machine; None on a real one."""
        return self.policy.watch.machine

    @property
    def told_device(self) -> str:
        """The device's name in records: `"cuda:0"`, or `"mps (simulated m2-16gb on cpu)"`."""
        device, machine = self.policy.watch.device, self.simulated
        return str(device) if machine is None else f"{device} (simulated {machine.profile.name} on {self.root_device})"

    @property
    def budget(self) -> Budget | None:
        """The bytes this run may use; None before `fit`.

        A `leave` budget changes as other programs come and go.
        """
        return self.policy.watch.budget

    @property
    def cap(self) -> Cap | None:
        """How the allocator is held to the budget; None before `fit`."""
        return self.policy.watch.cap

    @property
    def sizes(self) -> MicroBatchSize:
        """The micro-batch size in training."""
        return self.policy.sizes

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of an effective batch that run at once; None before the first batch is done."""
        return self.policy.sizing.micro_batch_size

    @property
    def effective_batch_size(self) -> int | None:
        """Rows of the largest batch so far; None before the first batch is done."""
        return self.policy.sizing.effective_batch_size

    @property
    def recoveries(self) -> int:
        """How many steps were repeated after memory ran out."""
        return self.policy.recoveries

    @property
    def events(self) -> list[str]:
        """The memory events of the run, as sentences."""
        return self.policy.events


def _name_of_run(environ: Mapping[str, str]) -> str:
    """Return a name that the ranks of one run share: the address at which they met."""
    return f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def _total_steps(trainer: L.Trainer) -> int | None:
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation that changes with the epoch
        return None
    return int(total) if math.isfinite(total) and total > 0 else None


def _logged_loss(trainer: L.Trainer) -> float | str | None:
    """Return the training loss that the module logged last.

    The loss itself is not kept: it would take memory of the next step.
    """
    logged = {name: value for name, value in trainer.callback_metrics.items() if "loss" in name.lower()}
    loss = next((value for name, value in logged.items() if not name.lower().startswith(("val", "test"))), None)
    if loss is None or loss.numel() != 1:
        return None
    value = float(loss)
    return value if math.isfinite(value) else str(value)
