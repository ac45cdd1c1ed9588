"""The plan of a fit whose module is sharded over ranks: dry runs of one rank's step."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from typing_extensions import override

from lightning_unified.cost_model.memory.static import tensor_bytes
from lightning_unified.cost_model.rates.links import tabled_link
from lightning_unified.planner.first_batch.distributed import DistributedFirstStep, DistributedPlanning
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.planner.search.planner import Planner
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.ranks.consensus import Ranks
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.lockstep import split_obstacle
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.split import BatchShape

__all__ = ["ShardedBudget", "ShardedFirstStep", "ShardedPlanning"]

log = logging.getLogger("lightning_unified")


class ShardedFirstStep(DistributedFirstStep):
    """Plans the step of a rank that holds a part of each parameter; all ranks agree on one plan.

    Args:
        shards: What this rank holds during a step.
        sharding: The same for dry runs, with the fake ranks and the groups of the fit.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        *,
        precision: str,
        ranks: Ranks,
        shards: WholeShards | KeptShards,
        sharding: Sharding,
    ) -> None:
        super().__init__(
            trainer,
            policy,
            precision=precision,
            ranks=ranks,
            reduction_bytes=shards.scratch_bytes,
            planning=partial(ShardedPlanning, sharding=sharding),
            budget=partial(ShardedBudget, shards=shards),
            sharding=sharding,
        )
        self._keeps_shards = isinstance(shards, KeptShards)

    @override
    def _found_without_plan(
        self, batch: Any, shape: BatchShape | None, *, step: Callable[[Any], ClosureResult], why: str
    ) -> str:
        """Probe sizes if a rank can run its step alone; else leave them to recovery."""
        if not self._keeps_shards:
            return super()._found_without_plan(batch, shape, step=step, why=why)
        found = "sizes are found by trying"
        self._policy.events.append(f"the step could not be traced ({why}); {found}")
        log.warning("The step could not be traced (%s); %s.", why, found)
        return found


class ShardedPlanning(DistributedPlanning):
    """Plans with dry runs of a sharded step, as the `plan` command does for so many devices.

    Measurements do not correct these predictions, because they hold for one device.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: DistributedPolicy,
        budget: StepBudget,
        *,
        precision: str,
        ranks: Ranks,
        sharding: Sharding,
    ) -> None:
        super().__init__(trainer, policy, budget, precision=precision, ranks=ranks)
        self._sharding = sharding

    @property
    def _in_lockstep(self) -> bool:
        return self._sharding.hold == "shards"

    @override
    def _planner(self, batch: Any, shape: BatchShape | None, **sharded: Any) -> Planner:
        self.calibration = None
        reading = self._policy.watch.reading()
        link = tabled_link(reading.backend, name=reading.name)
        return super()._planner(batch, shape, sharding=self._sharding, link=link, **sharded)

    @override
    def _obstacle(self, shape: BatchShape | None) -> str:
        if self._in_lockstep and (error := split_obstacle(self._trainer, self._distributed_policy, "fit")) is not None:
            return str(error)
        return super()._obstacle(shape)


class ShardedBudget(StepBudget):
    """Counts a rank's shards and their gradients too, while the module shows whole parameters.

    Args:
        shards: What this rank holds during a step.
    """

    def __init__(
        self, trainer: L.Trainer, policy: MemoryPolicy, *, reduction_bytes: int, shards: WholeShards | KeptShards
    ) -> None:
        super().__init__(trainer, policy, reduction_bytes=reduction_bytes)
        self._shards = shards

    @override
    def _held(self, batch: Any) -> int:
        hidden = self._shards.hidden if isinstance(self._shards, WholeShards) else []
        gradients = [shard.grad for shard in hidden if shard.grad is not None]
        return super()._held(batch) + sum(map(tensor_bytes, [*hidden, *gradients]))
