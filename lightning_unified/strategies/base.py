"""The base of the unified strategies: Lightning's hooks, connected to the memory policy.

Hooks call the memory policy, the precision gate, or the optimization loop that replaces Lightning's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_unified.files.folders import runs_folder
from lightning_unified.files.status import RunStatus
from lightning_unified.hardware.capabilities import capabilities
from lightning_unified.options import MemoryOptions
from lightning_unified.planner.first_batch.first_step import FirstStep
from lightning_unified.precision import (
    PrecisionChoice,
    platform_of,
    plugin_precision,
    resolve_precision,
    resolve_simulated,
    verify_run,
)
from lightning_unified.step.evaluation import EvaluationSteps
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.loop.backward import MicroBatchBackward
from lightning_unified.step.loop.fault_checked import FaultCheckedOptimization
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.checkpoint_io import AtomicCheckpointIO
from lightning_unified.step.results.progress_metrics import defer_progress_metrics
from lightning_unified.strategies.mapped_resume import MappedResume
from lightning_unified.strategies.run_interface import RunInterface

__all__ = ["UnifiedBase", "options_among"]

_DRAWS_BATCHES = (
    "{phase}_step(dataloader_iter) draws its own batches: they are not split, and a step that runs out of memory is not repeated. Write "
    "{phase}_step(batch, batch_idx) to have them split."
)
_MANUAL = (
    "the module optimizes by hand (automatic_optimization=False): its training batches are not split, and a step that runs out of memory is "
    "not repeated. Use automatic optimization to have them split."
)


def options_among(arguments: Mapping[str, Any]) -> MemoryOptions:
    """Return the memory options among the `arguments` of a strategy.

    They bear the names of the options' fields.
    """
    names = {field.name for field in fields(MemoryOptions)}
    return MemoryOptions(**{name: value for name, value in arguments.items() if name in names})


class UnifiedBase(RunInterface, MappedResume, MicroBatchBackward):
    """Adds a memory budget to the Lightning strategy that follows it among the base classes.

    A strategy calls `_use(policy)` before `super().__init__`, because Lightning's constructors set properties of this
    class.
    """

    def _use(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.first_step: FirstStep | None = None
        self.precision_choice: PrecisionChoice | None = None
        self._status = RunStatus(None)
        self._loop: UnifiedOptimization | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: options and events.

        The next fit makes the objects of a fit.
        """
        state = {name: value for name, value in super().__getstate__().items() if name != "_evaluations"}
        return {**state, "first_step": None, "_status": RunStatus(None), "_loop": None}

    @override
    def __repr__(self) -> str:
        """Name the Trainer as the only caller.

        Fabric shows this text when it refuses a Trainer's strategy.
        """
        return f"<{type(self).__name__}: for lightning.Trainer(strategy=…) only, because it splits and repeats the Trainer's steps>"

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
        """The Trainer's plugin, or `AtomicCheckpointIO`.

        A plugin that wraps another one and has none wraps `AtomicCheckpointIO`.
        """
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # the setter keeps an existing one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _resolve_precision(self) -> None:
        """Replace the precision plugin that the Trainer made from its flag by the precision gate's.

        Call it once the device is known.
        """
        self.policy.watch.prepare(self.root_device)  # before the gate reads the device's capabilities
        given, asked, here = self._precision_plugin, str(self.policy.options.precision), self.root_device
        machine = self.simulated
        if machine is None:
            resolved = resolve_precision(given, asked=asked, platform=platform_of(here))
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
        module, trains = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        self.policy.check_budget(module, ())
        if trains:
            self.policy.compilation.begin(module, obstacle=self._compile_obstacle(), ranks=trainer.world_size)
            self.policy.recomputation.begin(module)
        self.policy.watch.enter(module)
        super().setup(trainer)
        self.policy.applied_options.begin(module, self.optimizers)
        self.policy.check_budget(module, self.optimizers)
        verify_run(trainer)
        self.policy.begin(module, self.optimizers, precision=plugin_precision(self.precision_plugin))
        if trains and not module.automatic_optimization:
            self._say_unsplit(_MANUAL)
        defer_progress_metrics(trainer)
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress
        self._loop = loop.automatic_optimization = self._optimization(trainer)
        self._loop.optim_progress = progress
        self._evaluations = self._evaluation(trainer)
        self._status = RunStatus(runs_folder())

    def _compile_obstacle(self) -> str:
        """Return why nothing can be compiled on this device; empty if it can, or if the user asked for nothing."""
        watch = self.policy.watch
        if self.policy.options.compile is False:
            return ""
        if self.policy.options.attention == "chunked":
            return "attention in chunks runs outside compiled code (attention=chunked)"
        if watch.machine is not None:
            return (
                f"on the simulated machine {watch.machine.profile.name}, compiled code takes memory that is not counted"
            )
        found = next(one for one in capabilities(watch.reading()) if one.name == "compile")
        return "" if found.value else found.reason

    def _optimization(self, trainer: L.Trainer) -> UnifiedOptimization:
        precision = plugin_precision(self.precision_plugin)
        predicts = self.policy.options.predict
        self.first_step = FirstStep(trainer, self.policy, precision=precision) if predicts else None
        module = self.lightning_module
        assert module is not None
        trains = trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization
        if trains and self.policy.watch.device.type == "mps" and self.policy.options.detect_faults:
            return FaultCheckedOptimization(trainer, self.policy, planner=self.first_step)
        return UnifiedOptimization(trainer, self.policy, planner=self.first_step)

    def _evaluation(self, trainer: L.Trainer) -> EvaluationSteps:
        trains = trainer.state.fn == TrainerFn.FITTING
        return EvaluationSteps(trainer, self.policy, planner=self.first_step if trains else None)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if isinstance(self._loop, FaultCheckedOptimization):
            self._loop.settle(before_evaluation=True)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if isinstance(self._loop, FaultCheckedOptimization):
            self._loop.settle()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._status.tell(self.run_figures)
        self.policy.caches.batch_began(batch)

    @override
    def teardown(self) -> None:
        self.policy.recomputation.end()
        module = self.lightning_module
        self.policy.applied_options.end(trained=module is not None and module.trainer.global_step > 0)
        self.policy.compilation.end()
        self._status.end()
        if isinstance(self._loop, FaultCheckedOptimization):
            self._loop.close()
        self.policy.watch.leave()
        super().teardown()

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
            self._say_unsplit(_DRAWS_BATCHES.format(phase=phase), option="evaluation_micro_batch_size")
            return step(*args)
        return self._evaluations.run(step, *args, phase=phase)

    def _say_unsplit(self, why: str, *, option: str = "micro_batch_size") -> None:
        sizes = self.policy.sizes if option == "micro_batch_size" else self.policy.evaluation_sizes
        self.policy.notices.say_unsplit(why, option=option, asked=sizes.asked)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        call = partial(super().batch_to_device, batch, device, dataloader_idx)
        moved = self.policy.retried(call, phase="batch")
        module = self.lightning_module
        if self._loop is not None and module is not None and module.trainer.training:
            self._loop.batch_moved(batch, moved)
        return moved

    @override
    def model_to_device(self) -> None:
        self.policy.retried(super().model_to_device, phase="weights")
