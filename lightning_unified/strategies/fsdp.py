"""`Trainer(strategy="unified_fsdp")`: one module sharded over several ranks by FSDP2."""

import sys
from datetime import timedelta
from typing import Any, Literal

import lightning as L
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_unified.errors import ConfigurationError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.planner.first_batch.sharded import ShardedFirstStep
from lightning_unified.planner.ranks.fake_group import fake_mesh
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.precision import plugin_precision
from lightning_unified.step.evaluation import EvaluationSteps
from lightning_unified.step.loop import UnifiedOptimization
from lightning_unified.step.ranks.consensus import Point
from lightning_unified.step.ranks.policy import DistributedPolicy
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.sharding.iteration import initialize, reset_iteration
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.lockstep import LockstepEvaluation, LockstepOptimization
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.sharding.whole_loop import WholeOptimization
from lightning_unified.step.sharding.wrapping import (
    is_sharded,
    keeping_attributes,
    known_wrapping,
    materialize,
    note_wrapping,
    shard,
    sharded_roots,
)
from lightning_unified.strategies.base import options_among
from lightning_unified.strategies.ranked import check_start
from lightning_unified.strategies.shardable import (
    bytes_of_whole,
    copy_from_first,
    refuse_averages,
    refuse_module,
    refuse_optimizers,
    refuse_placements,
)
from lightning_unified.strategies.sharded_state import ShardedState
from lightning_unified.strategies.sharded_steps import ShardedSteps

__all__ = ["UnifiedFSDPStrategy"]


class UnifiedFSDPStrategy(ShardedSteps, ShardedState):
    """Trains one module sharded over several devices with FSDP2, each inside a memory budget.

    Each rank holds its rows of every parameter, of its gradient and of the optimizer state. The module's repeated blocks are
    gathered one by one; a module that calls `fully_shard` in `configure_model` is left as it is. The result is that of one process on
    the ranks' joined batches. If a rank runs out of memory, all repeat the batch; see docs/explanation/sharding.md.

    A strategy object serves one Trainer.

    The keyword arguments that are not listed here are those of `UnifiedDDPStrategy`.

    Args:
        hold: What a rank holds whole during a step. `"parameters"`: whole parameters and gradients, gathered once before the step and
            reduced once after it; each rank splits, checks and repeats its own batch alone. `"shards"`: one block at a time; all ranks
            run the same number of micro-batches, and check and repeat a batch together. `"auto"` chooses
            `"parameters"` if whole parameters, whole gradients and the rank's shards fit into the budget of every rank.
        optimizer_rollback: Keep a copy of this rank's rows of weights and optimizer state during each optimizer step, to restore if
            memory runs out while it writes: no other rank has these rows.
        save_distributed_checkpoint: Save a checkpoint as a folder, into which each rank writes its rows; all machines must share it. False
            saves one file with whole tensors, which are gathered on the first rank. Either is loaded, on any number of ranks.
        process_group_backend: The backend of collectives; default NCCL on CUDA, gloo elsewhere.
        timeout: How long a rank waits for the others, at a meeting or in a collective, before it ends with an error.
        start_method: How processes are started: `"popen"` runs the script again, `"spawn"`, `"fork"` and `"forkserver"` are
            multiprocessing's.
        broadcast_buffers: Whether all ranks take the first one's buffers after each optimizer step.

    Raises:
        ConfigurationError: If an argument has a value that is not allowed.
    """

    strategy_name = "unified_fsdp"
    gradients_are_alike = False

    def __init__(
        self,
        *,
        hold: Literal["auto", "parameters", "shards"] = "auto",
        budget: str | int = "auto",
        micro_batch_size: int | Literal["auto"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        precision: str = "trainer",
        optimizer_kernel: Literal["keep", "auto", "fused", "foreach", "for-loop"] = "keep",
        loss_chunk: int | Literal["auto", False] = "auto",
        attention: Literal["auto", "chunked", "torch"] = "auto",
        compile: Literal["auto", "blocks", "whole", False] = False,  # noqa: A002
        predict: bool = True,
        recover: bool = True,
        optimizer_rollback: bool = True,
        micro_batches: MicroBatchRules | None = None,
        batch_norm: Literal["refuse", "micro"] = "refuse",
        check_split: bool = True,
        evaluation_micro_batch_size: int | Literal["auto"] = "auto",
        window_mean: Literal["batches", "terms"] = "batches",
        remember: str | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        broadcast_buffers: bool = True,
    ) -> None:
        check_start(start_method, timeout)
        if hold not in ("auto", "parameters", "shards"):
            raise ConfigurationError(f'hold={hold!r}: give "auto", "parameters" or "shards".')
        if not isinstance(save_distributed_checkpoint, bool):
            raise ConfigurationError(
                f"save_distributed_checkpoint={save_distributed_checkpoint!r}: give true or false."
            )
        options = options_among(locals())
        self._use(DistributedPolicy(options, BudgetWatch(budget)))
        self._hold = hold
        self._saves_folders = save_distributed_checkpoint
        self._broadcast_buffers = broadcast_buffers
        self._mesh: DeviceMesh | None = None
        self._fake_mesh: DeviceMesh | None = None
        self._shards = None
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without what connects it to the other ranks."""
        return {**super().__getstate__(), "_mesh": None, "_fake_mesh": None, "_shards": None}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with one dimension `"data_parallel"`; `configure_model` may use it."""
        assert self._mesh is not None, "the mesh exists once fit, validate, test or predict has begun"
        return self._mesh

    @property
    def whole_parameters(self) -> list[Tensor]:
        """The whole parameters that a step computes with; none before they are gathered for the first time."""
        return self._shards.whole_parameters if isinstance(self._shards, WholeShards) else []

    @property
    def holds(self) -> Literal["parameters", "shards"]:
        """What a rank holds whole during a step: `"parameters"` or `"shards"`."""
        return "shards" if isinstance(self._shards, KeptShards) else "parameters"

    @override
    def _shard_of(self, tensor: Tensor) -> Tensor:
        return self._shards.shard_of(tensor) if isinstance(self._shards, WholeShards) else tensor

    @override
    def _write_back(self) -> None:
        if isinstance(self._shards, WholeShards):
            self._shards.write_back()

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        if self._mesh is None:
            self._mesh = init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",))
            self._fake_mesh = fake_mesh() if self.policy.options.predict else None
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._mesh  # as Lightning's ModelParallelStrategy

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """Shard the module, then set up as every unified strategy does."""
        module = self.lightning_module
        assert module is not None
        with self.ranks.reporting_errors():
            if self._precision_plugin is None:
                self._precision_plugin = Precision()
            refuse_module(module, self.precision_plugin, trains=trainer.state.fn == TrainerFn.FITTING)
            refuse_averages(trainer)
            self.precision_plugin.convert_module(module)
            if not is_sharded(module):
                copy_from_first(module, self.ranks)
                shard(module, self.device_mesh)
            note_wrapping(module)
            materialize(module, self.root_device)
            refuse_placements(module)
        super().setup(trainer)

    @override
    def _set_up_model(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        with keeping_attributes(module):
            self.model_to_device()
        roots = sharded_roots(module)
        initialize(roots)
        with self.ranks.reporting_errors():
            keeps = self._keeps_shards(module)
            self._shards = (KeptShards if keeps else WholeShards)(module, roots, self.ranks)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()
        # the norm of sharded gradients is a sum over ranks
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    @override
    def _optimization(self, trainer: L.Trainer) -> UnifiedOptimization:
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._optimization(trainer)
        shards = self._shards
        assert shards is not None
        self.first_step = self._planned(trainer, shards) if self.policy.options.predict else None
        arguments: dict[str, Any] = {"broadcast_buffers": self._broadcast_buffers, "planner": self.first_step}
        if isinstance(shards, KeptShards):
            return LockstepOptimization(trainer, self.policy, ranks=self.ranks, shards=shards, **arguments)
        return WholeOptimization(trainer, self.policy, ranks=self.ranks, shards=shards, **arguments)

    def _planned(self, trainer: L.Trainer, shards: WholeShards | KeptShards) -> ShardedFirstStep:
        wrapping = known_wrapping(trainer.lightning_module)
        return ShardedFirstStep(
            trainer,
            self.policy,
            precision=plugin_precision(self.precision_plugin),
            ranks=self.ranks,
            shards=shards,
            sharding=Sharding(devices=self.world_size, hold=self.holds, mesh=self._fake_mesh, wrapping=wrapping),
        )

    @override
    def _evaluation(self, trainer: L.Trainer) -> EvaluationSteps:
        if not isinstance(self._shards, KeptShards):
            return super()._evaluation(trainer)
        planner = self.first_step if trainer.state.fn == TrainerFn.FITTING else None
        return LockstepEvaluation(trainer, self.policy, ranks=self.ranks, shards=self._shards, planner=planner)

    def _keeps_shards(self, module: nn.Module) -> bool:
        """Return whether ranks hold shards during a step.

        They do if the user asks for it, or if whole parameters and gradients exceed the budget of one rank.
        """
        if self._hold != "auto":
            return self._hold == "shards"
        budget = self.policy.watch.budget
        fits = budget is None or bytes_of_whole(module, ranks=self.world_size) <= budget.bytes
        words = self.ranks.meet(Point.DECISION, digest=int(not fits))
        return any(word.digest for word in words)

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if self._shards is not None and module is not None:
            # Lightning moves the module, which FSDP2 refuses in mid-step
            reset_iteration(sharded_roots(module), reshards=True)
        fails = sys.exc_info()[0] is not None
        try:
            super().teardown()
        except RuntimeError:
            if not fails:  # the graph of a step that failed keeps parameters where they are; its own error says more
                raise
