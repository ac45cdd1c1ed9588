"""The strategy of a dry run: this package's step without a device or a budget."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.nn.module_tree.walks import tensors_of
from lightning_unified.options import MemoryOptions
from lightning_unified.planner.dry_run.kernels import choose_kernel, host_state
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.step.evaluation import EvaluationSteps
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.loop.backward import MicroBatchBackward
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.recovery.sizes import MicroBatchSize
from lightning_unified.step.recovery.snapshot import StepSnapshot
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.split.roles import Roles

__all__ = ["DryRunStrategy"]

_ENDLESS = 1 << 62


class DryRunStrategy(MicroBatchBackward, SingleDeviceStrategy):
    """Runs steps as `UnifiedStrategy` does, and sets the recorder's phase.

    Args:
        micro_batch_size: Rows of a micro-batch; None for whole batches.
        kernel: The optimizers' kernel; None for the default of `backend`.
        backend: The backend of the trace.
        micro_batches: The rules given to the live strategy.
        is_prepared: Whether the rule `prepare` has already been applied to training batches.
        copies_weights: Whether weights and optimizer state are copied around the optimizer step.
        shards: What a rank of `unified_fsdp` holds during a step; None for one that does not recover, and for one device.

    Attributes:
        steps: The number of optimizer steps so far.
        backward_has_ended: Called at the end of each backward pass.
    """

    strategy_name = "unified_dry_run"

    def __init__(
        self,
        recorder: Recorder,
        *,
        micro_batch_size: int | None,
        kernel: str | None,
        backend: str,
        device: torch.device,
        micro_batches: MicroBatchRules | None = None,
        roles: Mapping[str, Roles],
        is_prepared: bool = False,
        copies_weights: bool = False,
        shards: WholeShards | KeptShards | None = None,
    ) -> None:
        super().__init__(device=str(device), accelerator=_Nothing())
        options = MemoryOptions(
            micro_batch_size=micro_batch_size or "auto",
            micro_batches=micro_batches,
            batch_norm="micro",
            check_split=False,
            optimizer_rollback=copies_weights,
        )
        self.policy = MemoryPolicy(options, _NoBudget("auto"))
        self.policy.batches.known_roles = dict(roles)
        self._is_prepared, self._shards = is_prepared, shards
        self.steps = 0
        self.backward_has_ended: Callable[[], None] = _nothing
        self._recorder, self._kernel, self._backend = recorder, kernel, backend

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        cast("Any", self.lightning_module.trainer).adopt()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        module = self.lightning_module
        assert module is not None
        self.policy.begin(module, self.optimizers, precision="")
        self._evaluations = EvaluationSteps(trainer, self.policy)
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress
        loop.automatic_optimization = _Steps(
            trainer, self.policy, strategy=self, is_prepared=self._is_prepared, shards=self._shards
        )
        loop.automatic_optimization.optim_progress = progress

    def split(self, micro_batch_size: int | None, *, num_micro_batches: int) -> None:
        """Set the micro-batch size from now on, as if it had been set from the beginning.

        Args:
            micro_batch_size: Rows of a micro-batch; None for whole batches.
            num_micro_batches: The number of micro-batches to trace; for an encoder's call, the number of chunks.
        """
        assert self.lightning_module is not None
        self.policy.most_chunks = num_micro_batches
        self.policy.sizing.training = MicroBatchSize(micro_batch_size or "auto")
        self.policy.begin(self.lightning_module, self.optimizers, precision="")

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            choose_kernel(optimizer, kernel=self._kernel, backend=self._backend)

    @override
    def model_to_device(self) -> None:
        """Move nothing: the fake copy is on its device."""

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.phase = "forward"
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluations.run(super().validation_step, *args, phase="validation") if not kwargs else None

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._recorder.backward_begins()
        loss = super().backward(*args, **kwargs)
        self._backward_ends()
        return loss

    @override
    def backward_micro_batch(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        share: float | None,
        first: bool,
        leaves: Sequence[Tensor] = (),
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        self._recorder.backward_begins()
        scaled = super().backward_micro_batch(loss, optimizer, share, first, leaves, kept)
        self._backward_ends()
        return scaled

    def _backward_ends(self) -> None:
        self.mark_gradients()
        self.backward_has_ended()
        self._recorder.phase = "forward"  # the next micro-batch may follow

    def batch_has_run(self) -> None:
        """Begin the optimizer phase: the last backward pass of the batch has ended."""
        self._recorder.phase = "optimizer step"

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_automatic:
            self._recorder.phase = "optimizer step"
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self.mark_state()
        self.steps += 1
        if not self._is_automatic:
            self._recorder.phase = "forward"
        return result

    @property
    def _is_automatic(self) -> bool:
        """Whether Lightning runs the backward pass and the optimizer, not the module itself."""
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    def mark_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Mark the storages that are gradients now, of all `parameters` of the module; None looks for these."""
        assert self.lightning_module is not None
        with torch._C.DisableTorchFunction():  # reading gradients is no call of the step
            found = (one.grad for one in parameters or tensors_of(self.lightning_module)[0])
            gradients = [one for one in found if one is not None]
        self._recorder.mark(gradients, "gradients")

    def mark_state(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Mark the storages that are gradients or optimizer state now; `parameters` is as for `mark_gradients`."""
        self.mark_gradients(parameters)
        self._recorder.mark(_tensors_of_state(self.optimizers), "optimizer state")
        if self._backend != "cpu":
            self._recorder.drop(host_state(self.optimizers))


def _nothing() -> None:
    """Do nothing."""


class _Steps(UnifiedOptimization):
    """The steps of a dry run.

    Args:
        strategy: Sets the phase when the optimizer step of a batch begins.
        is_prepared: Whether the rule `prepare` has already been applied to batches; it may not accept its own result.
        shards: As for the strategy.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: MemoryPolicy,
        *,
        strategy: DryRunStrategy,
        is_prepared: bool,
        shards: WholeShards | KeptShards | None,
    ) -> None:
        super().__init__(trainer, policy)
        self._dry_run, self._is_prepared, self._shards = strategy, is_prepared, shards

    @override
    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if isinstance(self._shards, WholeShards):
            self._shards.gather()
        return super().run(*args, **kwargs)

    @override
    def _trained(self, optimizer: Optimizer) -> list[Tensor]:
        trained = super()._trained(optimizer)
        return self._shards.whole(trained) if isinstance(self._shards, WholeShards) else trained

    @override
    def _finish_gradients(self, optimizer: Optimizer) -> None:
        super()._finish_gradients(optimizer)
        if self._shards is not None and self._closes_window:
            self._shards.average_gradients(self._shards.absent())

    @override
    def _prepared(self, batch: Any) -> Any:
        return batch if self._is_prepared else super()._prepared(batch)

    @override
    def _snapshot(self, batch: Any) -> StepSnapshot:
        with torch._C.DisableTorchFunction():  # reading attributes of tensors is no call of the step
            return super()._snapshot(batch)

    @override
    def before_weights(self, optimizer: Optimizer) -> None:
        with torch._C.DisableTorchFunction():
            super().before_weights(optimizer)

    @override
    def after_backward(self, loss: Tensor | None, optimizer: Optimizer) -> None:
        self._dry_run.batch_has_run()
        super().after_backward(loss, optimizer)


class _Nothing(CPUAccelerator):
    """An accelerator that touches no device."""

    @override
    def setup_device(self, device: torch.device) -> None:
        """Do nothing: there is no device."""

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Do nothing: there is no device."""

    @override
    def teardown(self) -> None:
        """Do nothing: there is no device."""


class _NoBudget(BudgetWatch):
    """An unlimited budget, whose pool is never read."""

    @override
    def begin(self) -> None:
        """Reset no counter."""

    @property
    @override
    def bytes(self) -> int:
        return _ENDLESS

    @override
    def room(self) -> None:
        return None

    @override
    def release(self) -> None:
        """Clear no cache."""

    @override
    def follow(self) -> None:
        return None

    @override
    def overrun(self) -> None:
        return None


def _tensors_of_state(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    found: list[Tensor] = []
    waiting: list[Any] = [optimizer.state for optimizer in optimizers]
    parameters = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            if id(one) not in parameters:
                found.append(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
    return found
