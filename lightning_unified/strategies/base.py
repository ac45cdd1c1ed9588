"""What the strategies have in common: Lightning's hooks, and behind them the memory policy, the precision gate and the seam."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_unified.cost_model import Plan
from lightning_unified.hardware import Budget, Cap, Figure, Reading
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.options import AppliedOptions
from lightning_unified.options.activation_checkpointing import ActivationCheckpointing
from lightning_unified.planner.first_step import FirstStep
from lightning_unified.precision import (
    PrecisionChoice,
    platform_of,
    plugin_precision,
    resolve_precision,
    resolve_simulated,
    verify_run,
)
from lightning_unified.status import RunFigures, RunStatus, runs_directory
from lightning_unified.step.evaluation import EvaluationSteps
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.loop.backward import PartwiseBackward
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.sizes import MicroBatchSize

__all__ = ["Budgeted"]

T = TypeVar("T")

_DRAWN = (
    "{phase}_step(dataloader_iter) draws its own batches: they are not split, and a step that runs out of memory is not repeated. Write "
    "{phase}_step(batch, batch_idx) to have them split."
)
_BY_HAND = (
    "the module optimizes by hand (automatic_optimization=False): its training batches are not split, and a step that runs out of memory is "
    "not repeated. Use automatic optimization to have them split."
)


class Budgeted(PartwiseBackward):
    """Makes the strategy it is mixed into train inside a memory budget; goes before that strategy among the bases.

    Before `super().__init__` the strategy sets `policy`, and calls `_set_options`.
    """

    policy: MemoryPolicy

    def _set_options(
        self,
        *,
        recompute: bool | Literal["auto"],
        precision: str,
        optimizer_kernel: Literal["keep", "auto", "fused", "foreach", "for-loop"],
        predict: bool,
    ) -> None:
        self._predicts = predict
        self.first_step: FirstStep | None = None
        self.policy.recomputation = ActivationCheckpointing(recompute)
        self.policy.memory_options = AppliedOptions(optimizer_kernel=optimizer_kernel)
        self._asked_precision = str(precision)
        self.precision_choice: PrecisionChoice | None = None
        self._status = RunStatus(None)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process keeps: the options and what happened. The objects of one fit are made by the next."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_evaluations"}
        return {**state, "first_step": None, "_status": RunStatus(None)}

    @override
    def __repr__(self) -> str:
        """Say whose it is: Fabric, whose loop is the user's own, shows this in the error with which it refuses a Trainer's strategy."""
        return f"<{type(self).__name__}: for lightning.Trainer(strategy=…) only, for it cuts and repeats the Trainer's steps>"

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The Trainer's plugin, or `AtomicCheckpointIO`; a plugin that wraps another one and was given none wraps that."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # the setter leaves one that is there
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _resolve_precision(self) -> None:
        """Put the gate's plugin in place of the one that the Trainer made from its flag; the device is known."""
        self.policy.watch.prepare(self.root_device)  # before the gate asks the device what it is
        given, asked, here, machine = self._precision_plugin, self._asked_precision, self.root_device, self.simulated
        if machine is None:
            self.precision_choice, self._precision_plugin = resolve_precision(
                given, asked=asked, platform=platform_of(here)
            )
        else:
            there = platform_of(torch.device(machine.device), sources=machine.sources)
            resolved = resolve_simulated(given, asked=asked, simulated=there, here=platform_of(here))
            self.precision_choice, self._precision_plugin = resolved

    @override
    def setup_environment(self) -> None:
        self.policy.watch.prepare(self.root_device)
        super().setup_environment()
        self._resolve_budget()

    def _resolve_budget(self) -> None:
        self.policy.watch.resolve()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self.policy.refuse_if_too_small(module, ())
        if trainer.state.fn == TrainerFn.FITTING:
            self.policy.recomputation.begin(module)
        self.policy.watch.enter(module)
        super().setup(trainer)
        self.policy.memory_options.begin(module, self.optimizers)
        self.policy.refuse_if_too_small(module, self.optimizers)
        verify_run(trainer)
        self.policy.begin(module, self.optimizers, precision=plugin_precision(self.precision_plugin))
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            self.policy.note_unsplit("micro_batch_size", _BY_HAND)
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress
        loop.automatic_optimization = self._optimization(trainer)
        loop.automatic_optimization.optim_progress = progress
        trains = trainer.state.fn == TrainerFn.FITTING
        self._evaluations = EvaluationSteps(trainer, self.policy, planner=self.first_step if trains else None)
        self._status = RunStatus(runs_directory())

    def _optimization(self, trainer: L.Trainer) -> UnifiedOptimization:
        precision = plugin_precision(self.precision_plugin)
        self.first_step = FirstStep(trainer, self.policy, precision=precision) if self._predicts else None
        return UnifiedOptimization(trainer, self.policy, planner=self.first_step)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._status.tell(self._figures)
        self.policy.caches.batch_began(batch)

    @override
    def teardown(self) -> None:
        self.policy.recomputation.end()
        self.policy.memory_options.end()
        self._status.end()
        self.policy.watch.leave()
        super().teardown()

    def _figures(self) -> RunFigures:
        """Return what `watch` shows of this run; counters only, nothing waits for the device."""
        module, reading, peak = self.lightning_module, self.reading(), self.measured_peak()
        assert module is not None
        root = str(module.trainer.default_root_dir)
        return RunFigures(
            directory=root if "://" in root else str(Path(root).absolute()),
            module=type(module).__name__,
            device=self.told_device,
            step=module.trainer.global_step,
            effective_batch_size=self.effective_batch_size,
            micro_batch_size=self.micro_batch_size,
            allocated_bytes=reading.allocated.bytes,
            reserved_bytes=reading.reserved.bytes,
            peak_bytes=peak.bytes,
            peak_source=peak.source,
            budget_bytes=None if self.budget is None else self.budget.bytes,
            recoveries=self.recoveries,
        )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step, args, kwargs, phase="validation")

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, args, kwargs, phase="test")

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().predict_step, args, kwargs, phase="predict")

    def _evaluated(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, phase: str) -> Any:
        if kwargs or not args:
            return step(*args, **kwargs)
        if isinstance(args[0], Iterator):
            self.policy.note_unsplit("evaluation_micro_batch_size", _DRAWN.format(phase=phase))
            return step(*args)
        return self._evaluations.run(step, *args, phase=phase)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self._twice(partial(super().batch_to_device, batch, device, dataloader_idx), phase="batch")

    @override
    def model_to_device(self) -> None:
        self._twice(super().model_to_device, phase="weights")

    def _twice(self, call: Callable[[], T], *, phase: str) -> T:
        """Return what `call` gives, after clearing caches if memory runs out in it; it changes nothing that must be undone."""
        if not self.policy.recover:
            return call()
        attempt = 0
        while True:
            result, reason = caught(call)
            if reason is None:
                return result  # pyright: ignore[reportReturnType]
            attempt += 1
            self.policy.out_of_memory(phase=phase, reason=reason, shape=None, attempt=attempt)

    @property
    def plan(self) -> Plan:
        """What was decided, and why, as far as it is known by now."""
        budget, cap, choice = self.policy.watch.budget, self.policy.watch.cap, self.precision_choice
        written = self.policy.watch.written
        assert budget is not None, "the plan exists once fit has begun"
        first, recomputation = self.first_step, self.policy.recomputation
        return Plan(
            micro_batch_size=self.micro_batch_size,
            recompute=recomputation.on,
            recomputed="" if recomputation.policy is None else str(recomputation.policy),
            optimizer_kernel=self.policy.memory_options.optimizer_kernel,
            loss_chunk=self.policy.memory_options.loss_chunk,
            prediction=None if first is None else first.prediction,
            predicted_peak_bytes=None if first is None else first.predicted_peak_bytes,
            alternatives=() if first is None else first.alternatives,
            precision=plugin_precision(self.precision_plugin),
            budget_bytes=budget.bytes,
            reasons={
                "budget": budget.reason,
                "micro_batch_size": self.policy.size_reason,
                "recompute": recomputation.reason,
                "prediction": "not asked for" if first is None else first.reason,
                **({} if first is None else first.reasons),
                **self.policy.memory_options.reasons,
                "precision": choice.reason if choice is not None else "Lightning's default",
                "loss_weight": self.policy.weighting_reason,
                "cap": self.policy.watch.named(cap.reason) if cap is not None else "none",
                **({} if written is None else {"allocator_settings": self.policy.watch.named(written.reason)}),
            },
        )

    def reading(self) -> Reading:
        """Return what the device's pool says now; never waits for the device."""
        return self.policy.watch.reading()

    def measured_peak(self) -> Figure:
        """Return the highest use of this fit so far, in bytes, and which counter says so."""
        return self.policy.watch.measured_peak()

    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch from the next batch on, as `MemoryPolicy.shrink` says; return whether it could be done."""
        return self.policy.shrink(reason)

    def grow(self, reason: str) -> bool:
        """Take back one halving by `shrink`; return whether there was one."""
        return self.policy.grow(reason)

    @property
    def spare_bytes(self) -> int | None:
        """Bytes of the budget beside the steps as they are planned, which the module may keep from one step to the next.

        What it keeps it says as `kept_bytes`, and frees when `give_back()` is called: where memory is short, after which nothing is
        spare any more, or a step is planned, around as much. None where nobody plans or repeats steps.
        """
        if self.policy.kept.is_refused:
            return 0
        return None if self.first_step is None or not self.policy.recover else self.first_step.spare_bytes

    def feel_pressure(self, pressed: bool) -> None:
        """Learn whether the system warns that memory is short: caches are then cleared for less."""
        self.policy.caches.pressed = pressed

    @property
    def simulated(self) -> SimulatedMachine | None:
        """The machine that stands for the one this runs on; None for this one itself."""
        return self.policy.watch.machine

    @property
    def told_device(self) -> str:
        """The device as records name it: `"cuda:0"`, or `"mps (simulated m2-16gb on cpu)"`."""
        device, machine = self.policy.watch.device, self.simulated
        return str(device) if machine is None else f"{device} (simulated {machine.profile.name} on {self.root_device})"

    @property
    def budget(self) -> Budget | None:
        """The bytes this run may use; None before `fit`. What leaves room for other programs changes as they come and go."""
        return self.policy.watch.budget

    @property
    def cap(self) -> Cap | None:
        """What was done to hold the allocator to the budget; None before `fit`."""
        return self.policy.watch.cap

    @property
    def sizes(self) -> MicroBatchSize:
        """The micro-batch size in use."""
        return self.policy.sizes

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of an effective batch that go through forward and backward at once; None before the first batch is done."""
        return self.policy.micro_batch_size

    @property
    def effective_batch_size(self) -> int | None:
        """Rows of the largest batch so far; None before the first batch is done."""
        return self.policy.effective_batch_size

    @property
    def recoveries(self) -> int:
        """How many steps were repeated after memory ran out."""
        return self.policy.recoveries

    @property
    def events(self) -> list[str]:
        """What was decided on the way, for people."""
        return self.policy.events
