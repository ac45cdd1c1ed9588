"""The training step of ranks that hold whole parameters and gradients: each may repeat its step alone."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.sharding.update import ShardedUpdate

__all__ = ["WholeOptimization"]


class WholeOptimization(ShardedUpdate):
    """Runs one optimization step on every rank as `DistributedOptimization` does, with whole parameters.

    All ranks gather the parameters before the step. Forward and backward passes then run as on replicas. The reduction
    leaves each rank the gradients of its own rows, for its own part of the optimizer step.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        ranks: Ranks,
        shards: WholeShards,
        broadcast_buffers: bool,
        planner: StepPlanner | None = None,
    ) -> None:
        super().__init__(
            trainer, policy, ranks=ranks, replicas=shards, broadcast_buffers=broadcast_buffers, planner=planner
        )
        self._shards = shards

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        with self._ranks.reporting_errors():
            self._shards.gather()
        return super().run(optimizer, batch_idx, kwargs)

    @override
    def _trained(self, optimizer: Optimizer) -> list[Tensor]:
        return self._shards.whole(super()._trained(optimizer))

    @override
    def _run_attempt(self, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
        outputs, reason = super()._run_attempt(run)
        if reason is not None:
            self._shards.undo()  # before the attempt is undone: its records are of whole parameters
        return outputs, reason
