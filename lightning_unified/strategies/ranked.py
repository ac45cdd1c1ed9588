"""The base of the strategies of several ranks: connects the processes, and lets all of them end together."""

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.errors import ConfigurationError, RunError
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.strategies.base import UnifiedBase
from lightning_unified.strategies.collectives import NamedLosses
from lightning_unified.strategies.launcher import devices_of_launch

__all__ = ["RankedBase", "check_start"]


class RankedBase(NamedLosses, UnifiedBase, DDPStrategy):
    """Adds the meetings of several ranks to a strategy.

    Lightning's `DDPStrategy` starts and connects their processes.
    """

    strategy_name = "unified"
    policy: DistributedPolicy
    _ranks: Ranks | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; it has no connection to the other ranks."""
        return {**super().__getstate__(), "_ranks": None}

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
        _refuse_collectives(
            module, self.strategy_name, is_synced=self._layer_sync is not None, recover=self.policy.options.recover
        )
        with self.ranks.reporting_errors():
            super().setup(trainer)
            _refuse_sharded(self.optimizers, self.strategy_name)
        self.ranks.meet(Point.READY)

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


def check_start(start_method: str, timeout: timedelta) -> None:
    """Raise `ConfigurationError` if a start method or a timeout is not allowed."""
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


def _refuse_collectives(module: L.LightningModule, strategy: str, *, is_synced: bool, recover: bool) -> None:
    """Raise `ConfigurationError` if a layer or metric waits for other ranks within a step.

    Args:
        module: The module to train.
        strategy: The name of the strategy.
        is_synced: Whether the Trainer has `sync_batchnorm=True`.
        recover: Whether a rank may repeat its step alone.
    """
    layers = [name for name, child in module.named_modules() if isinstance(child, torch.nn.SyncBatchNorm)]
    if is_synced or layers:
        raise ConfigurationError(
            f'strategy="{strategy}" cannot run SyncBatchNorm ({layers[0] if layers else "sync_batchnorm=True"}): it waits for the other '
            "ranks in the middle of forward and backward, where one of them may have run out of memory. Use GroupNorm, BatchNorm "
            'with each rank\'s own statistics, or strategy="ddp".'
        )
    metrics = (name for name, child in module.named_modules() if isinstance(child, Metric) and child.dist_sync_on_step)
    if recover and (metric := next(metrics, None)) is not None:
        raise ConfigurationError(
            f"the metric {metric} has dist_sync_on_step=True, which waits for the other ranks in the middle of a step that this "
            "rank may have to repeat alone; leave it False (its value at the end of the epoch is of all ranks), or set recover=False."
        )


def _refuse_sharded(optimizers: Iterable[Optimizer], strategy: str) -> None:
    """Raise `ConfigurationError` if an optimizer waits for other ranks in its step."""
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.distributed."):
            raise ConfigurationError(
                f'strategy="{strategy}" needs an optimizer that each rank runs by itself, and {type(optimizer).__name__} waits for '
                'the other ranks in its step; use an ordinary one, or strategy="ddp".'
            )
