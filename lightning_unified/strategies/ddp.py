"""`Trainer(strategy="unified_ddp")`: several ranks, each inside its memory budget."""

import zlib
from datetime import timedelta
from typing import Any, Literal

import lightning as L
from typing_extensions import override

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.planner.first_batch.distributed import DistributedFirstStep
from lightning_unified.precision import plugin_precision
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.ranks.consensus import Point, Ranks
from lightning_unified.step.ranks.loop import DistributedOptimization
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.ranks.reduction import Replicas
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.strategies.base import options_among
from lightning_unified.strategies.ranked import RankedBase, check_start

__all__ = ["UnifiedDDPStrategy"]


class UnifiedDDPStrategy(RankedBase):
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
        check_start(start_method, timeout)
        options = options_among(locals())
        self._use(DistributedPolicy(options, BudgetWatch(budget)))
        self._broadcast_buffers = broadcast_buffers
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
        """Return the state for another process; without what connects it to the other ranks."""
        return {**super().__getstate__(), "_replicas": None}

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
