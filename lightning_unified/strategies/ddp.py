"""`Trainer(strategy="unified_ddp")`: several ranks, each inside its memory budget."""

import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, RunError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.planner.first_batch.distributed import DistributedFirstStep
from lightning_unified.precision import plugin_precision
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.ranks.loop import DistributedOptimization
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.ranks.reduction import Replicas
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.strategies.base import UnifiedBase, options_among
from lightning_unified.strategies.collectives import NamedLosses
from lightning_unified.strategies.launcher import devices_of_launch

__all__ = ["UnifiedDDPStrategy"]


class UnifiedDDPStrategy(NamedLosses, UnifiedBase, DDPStrategy):
    """Trains a copy of any LightningModule on each of several devices or processes, like `ddp`.

    Each rank runs its own batch inside its own memory budget, in as many micro-batches as it needs. Gradients are averaged once, after
    the last backward pass of the window. The result is that of `strategy="ddp"` with whole batches. Ranks meet before and after every
    collective. If a rank runs out of memory, in forward, backward, reduction or optimizer step, all repeat the batch. If one fails
    otherwise, or is gone, all end with an error that names it. See docs/explanation/several_ranks.md.

    `training_step` must hold no collective of its own, because a rank may repeat it alone. SyncBatchNorm, metrics with
    `dist_sync_on_step` and `self.all_gather` in it are refused. `self.log(…, sync_dist=True)` is written when the step is over.

    A strategy object serves one Trainer.

    The keyword arguments that are not listed here are those of `UnifiedStrategy`. On several ranks:

    - `budget` holds for each device. Ranks on CPUs of one machine share its memory and get equal shares of it.
    - `micro_batch_size` and `evaluation_micro_batch_size` hold for each rank. Each rank recovers evaluations by itself.
    - `predict`: each rank traces its own batch, and all use the same memory options and the smallest size.
    - `recover`: a step is repeated if any rank ran out of memory.
    - `optimizer_rollback` helps only if memory runs out on all ranks at once. Otherwise a rank copies weights from another one.
    - `micro_batches` must be picklable with `start_method="spawn"`.
    - `check_split`: each rank checks its own batches, and a refusal on one ends all.
    - `window_mean="terms"` counts the loss terms of all ranks.
    - `remember`: the first rank writes the file.

    Args:
        process_group_backend: The backend of collectives; default NCCL on CUDA, gloo elsewhere.
        timeout: How long a rank waits for the others, at a meeting or in a collective, before it ends with an error.
        start_method: How processes are started: `"popen"` runs the script again, `"spawn"`, `"fork"` and `"forkserver"` are
            multiprocessing's.
        broadcast_buffers: Whether all ranks take the first one's buffers after each optimizer step.
        find_unused_parameters: For manual optimization, which `DistributedDataParallel` reduces. Otherwise parameters without a
            gradient on some ranks count as zero there, and those without one on any rank have none.
        gradient_as_bucket_view: For manual optimization. Otherwise there are no buckets.
        static_graph: For manual optimization.

    Raises:
        ConfigurationError: If an argument has a value that is not allowed.
    """

    strategy_name = "unified_ddp"
    # All ranks have the same gradients when the optimizer reads them: decisions from gradients alone need no agreement.
    gradients_are_alike = True
    policy: DistributedPolicy

    def __init__(
        self,
        *,
        budget: str | int = "auto",
        micro_batch_size: int | Literal["auto"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        compile: Literal["auto", "blocks", "whole", False] = False,  # noqa: A002
        precision: str = "trainer",
        optimizer_kernel: Literal["keep", "auto", "fused", "foreach", "for-loop"] = "keep",
        loss_chunk: int | Literal["auto", False] = "auto",
        attention: Literal["auto", "chunked", "torch"] = "auto",
        predict: bool = True,
        recover: bool = True,
        optimizer_rollback: bool = False,
        micro_batches: MicroBatchRules | None = None,
        batch_norm: Literal["refuse", "micro"] = "refuse",
        check_split: bool = True,
        evaluation_micro_batch_size: int | Literal["auto"] = "auto",
        window_mean: Literal["batches", "terms"] = "batches",
        remember: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        _check_start(start_method, timeout)
        options = options_among(locals())
        self._use(DistributedPolicy(options, BudgetWatch(budget)))
        self._broadcast_buffers = broadcast_buffers
        self._ranks: Ranks | None = None
        self._replicas: Replicas | None = None
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; it has no connection to the other ranks."""
        return {**super().__getstate__(), "_ranks": None, "_replicas": None}

    @property
    def ranks(self) -> Ranks:
        """All ranks, once their processes are connected."""
        assert self._ranks is not None, "ranks are connected once fit, validate, test or predict has begun"
        return self._ranks

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine's ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices_of_launch(parallel_devices)
        if parallel_devices and self._start_method == "popen":
            self._resolve_precision()

    @override
    def setup_environment(self) -> None:
        if self.precision_choice is None:  # this is now a process of its own, which may query the device
            self._resolve_precision()
        self.policy.watch.sharers = self.num_processes if self.root_device.type == "cpu" else 1
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self._ranks is None or self._ranks.is_over:
            self._ranks = Ranks(timeout=self._timeout)
            self.policy.connect(self._ranks)

    @override
    def _resolve_budget(self) -> None:
        with self.ranks.reporting_errors():
            super()._resolve_budget()
        self.ranks.meet(Point.ENVIRONMENT)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        assert module is not None
        _refuse_collectives(module, is_synced=self._layer_sync is not None, recover=self.policy.options.recover)
        with self.ranks.reporting_errors():
            super().setup(trainer)
            _refuse_sharded(self.optimizers)
        self.ranks.meet(Point.READY)

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        self._replicas = None
        if module.automatic_optimization:
            self._replicas = _replicas_of(module, self.ranks)
        else:
            super().configure_ddp()

    @override
    def _optimization(self, trainer: L.Trainer) -> UnifiedOptimization:
        ranks, replicas = self.ranks, self._replicas
        if replicas is None:  # no training, or manual optimization
            return super()._optimization(trainer)
        if self.policy.options.predict:
            precision, scratch = plugin_precision(self.precision_plugin), replicas.scratch_bytes
            self.first_step = DistributedFirstStep(
                trainer, self.policy, precision=precision, ranks=ranks, reduction_bytes=scratch
            )
        return DistributedOptimization(
            trainer,
            self.policy,
            ranks=ranks,
            replicas=replicas,
            broadcast_buffers=self._broadcast_buffers,
            planner=self.first_step,
        )

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        module = self.lightning_module
        trains = module is not None and module.trainer.training
        with self.ranks.reporting_errors() if trains else nullcontext():  # ranks wait at the step's first meeting
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def shrink(self, reason: str) -> bool:
        """Halve the micro-batch of all ranks, which call it together; return whether any rank could."""
        return _any_of(self.ranks, super().shrink(reason))

    @override
    def grow(self, reason: str) -> bool:
        """Undo one halving by `shrink` on all ranks together; return whether any had one."""
        return _any_of(self.ranks, super().grow(reason))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        _refuse_apart(self._ranks, "all_gather", recover=self.policy.options.recover)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        _refuse_apart(self._ranks, "reduce", recover=self.policy.options.recover)
        return super().reduce(tensor, group=group, reduce_op=reduce_op)


def _check_start(start_method: str, timeout: timedelta) -> None:
    if start_method not in ("popen", "spawn", "fork", "forkserver"):
        raise ConfigurationError(f'start_method={start_method!r}: give "popen", "spawn", "fork" or "forkserver".')
    if not timeout > timedelta(0):
        raise ConfigurationError(f"timeout={timeout} must be above 0.")


def _any_of(ranks: Ranks, mine: bool) -> bool:
    """Return whether any rank gave True; all ranks call it together."""
    return any(word.digest for word in ranks.meet(Point.DECISION, digest=int(mine)))


def _refuse_apart(ranks: Ranks | None, what: str, *, recover: bool) -> None:
    """Raise `RunError` if a step that a rank may repeat alone asks for a collective."""
    if ranks is not None and ranks.are_apart and recover:
        raise RunError(
            f"training_step asks for {what} over all ranks, which waits for ranks that may have run out of memory in theirs. Do it in "
            'on_train_batch_end, or set recover=False with whole batches, or use strategy="ddp".'
        )


def _refuse_collectives(module: L.LightningModule, *, is_synced: bool, recover: bool) -> None:
    """Raise `ConfigurationError` if a layer or metric waits for other ranks within a step.

    Args:
        module: The module to train.
        is_synced: Whether the Trainer has `sync_batchnorm=True`.
        recover: Whether a rank may repeat its step alone.
    """
    layers = [name for name, child in module.named_modules() if isinstance(child, torch.nn.SyncBatchNorm)]
    if is_synced or layers:
        raise ConfigurationError(
            f'strategy="unified_ddp" cannot run SyncBatchNorm ({layers[0] if layers else "sync_batchnorm=True"}): it waits for the other '
            "ranks in the middle of forward and backward, where one of them may have run out of memory. Use GroupNorm, BatchNorm "
            'with each rank\'s own statistics, or strategy="ddp".'
        )
    metrics = (name for name, child in module.named_modules() if isinstance(child, Metric) and child.dist_sync_on_step)
    if recover and (metric := next(metrics, None)) is not None:
        raise ConfigurationError(
            f"the metric {metric} has dist_sync_on_step=True, which waits for the other ranks in the middle of a step that this "
            "rank may have to repeat alone; leave it False (its value at the end of the epoch is of all ranks), or set recover=False."
        )


def _refuse_sharded(optimizers: Iterable[Optimizer]) -> None:
    """Raise `ConfigurationError` if an optimizer waits for other ranks in its step."""
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.distributed."):
            raise ConfigurationError(
                f'strategy="unified_ddp" needs an optimizer that each rank runs by itself, and {type(optimizer).__name__} waits for '
                'the other ranks in its step; use an ordinary one, or strategy="ddp".'
            )


def _replicas_of(module: L.LightningModule, ranks: Ranks) -> Replicas:
    """Return the ranks' copies of `module` with the first rank's weights.

    Raises:
        ConfigurationError: If the ranks built different modules.
    """
    replicas = Replicas(module, ranks)
    words = ranks.meet(Point.MODULE, digest=zlib.crc32(replicas.description.encode()))
    other = next((word.rank for word in words if word.digest != words[0].digest), None)
    if other is not None:
        ranks.end()
        raise ConfigurationError(
            f"rank {other} made another {type(module).__name__} than rank 0: its parameters differ in number, name, shape or type. Build "
            "the module from the same arguments on all ranks."
        )
    replicas.copy_from_first(with_parameters=True)
    return replicas
