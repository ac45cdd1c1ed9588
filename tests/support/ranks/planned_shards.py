"""Fits of sharded ranks that plan their steps."""

from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.errors import LightningUnifiedError
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.first_batch.step_budget import StepBudget
from lightning_unified.planner.ranks.fake_group import fake_group
from lightning_unified.planner.ranks.sharded_copy import Sharding
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import CountedMemory, StepTraces
from tests.support.ranks.modules import Blocks, rank
from tests.support.ranks.planned_runs import MAPPED, for_certain
from tests.support.ranks.runs import GIB
from tests.support.ranks.sharded import SETTINGS, Deep, trained

Hold = Literal["parameters", "shards"]
ROWS = 16


class Rows(Blocks):
    """Blocks whose ranks divide 64 rows."""

    def __init__(self, *, ranks: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.part, self.seen = (rank, ranks), []

    def train_dataloader(self):
        rank, ranks = self.part
        rows = torch.randn(4 * ROWS, 64, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(rows[rank::ranks], batch_size=2 * ROWS // ranks)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02, foreach=True)


class ShardsItself(Rows):
    """Shards each block, and its layer by itself."""

    options: ClassVar[dict[str, Any]] = {}

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            for block in self.blocks:
                fully_shard(block[0], mesh=self.device_mesh, **self.options)
                fully_shard(block, mesh=self.device_mesh, **self.options)
            fully_shard(self, mesh=self.device_mesh, **self.options)


class ShardsItsWay(ShardsItself):
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


class HoldsHalf(L.Callback):
    """A device that has memory for half a batch."""

    def on_train_start(self, trainer, module):
        module.blocks[0][0].register_forward_pre_hook(self._look)

    def _look(self, layer, inputs):
        if len(inputs[0]) > ROWS // 2 and not isinstance(inputs[0], FakeTensor):
            raise torch.OutOfMemoryError("a test")


def needed(hold: Hold, kind: type[Rows] = Rows) -> dict[tuple[int, int | str], Prediction]:
    """Return predictions of a rank's step in a process that is no rank, by rows and recomputed blocks."""
    batch = torch.zeros(ROWS, 64, 32, dtype=torch.float64)
    step = StepSpec(module=kind().double(), batch=batch, sharding=Sharding(devices=2, hold=hold))
    counted = CountedMemory(allocator=AllocatorSettings(mmap_threshold=MAPPED))
    sizes: list[tuple[int, Any]] = [(ROWS, 0), (ROWS, "all"), (ROWS // 2, 0), (ROWS // 2, "all")]
    with fake_group(2):
        planner = Planner(StepTraces(step, counted=counted))
        return {
            (rows, blocks): planner.predict(
                Combination(precision="64-true", recompute=RecomputePolicy(blocks=blocks)), micro_batch_size=rows
            )
            for rows, blocks in sizes
        }


def planned(hold: Hold, whole: int, half: int) -> dict[str, Any]:
    """Return fits in which ranks have memory for a batch, for a recomputed one, or one rank for half of one."""
    for_certain()
    return {
        "enough": _planned(GIB, hold=hold),
        "recomputed": _planned(whole, hold=hold),
        "one is short": _planned((GIB, half)[rank()], HoldsHalf(), hold=hold),
        "refused": _refused(hold),
    }


def planned_otherwise(hold: Hold) -> dict[str, Any]:
    """Return fits without a plan, of modules that shard themselves, and with validations."""
    for_certain()
    return {
        "unplanned": _planned(GIB, HoldsHalf(), predict=False, hold=hold),
        "shards itself": _planned(GIB, kind=ShardsItself, hold=hold),
        "shards its way": _planned(GIB, kind=ShardsItsWay, hold=hold),
        "validates": _planned(GIB, kind=Deep, fit=SETTINGS["clipped windows"], hold=hold),
    }


def _refused(hold: Hold) -> str:
    try:
        _planned(100_000, hold=hold)
    except LightningUnifiedError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _planned(
    left: int, *callbacks: L.Callback, kind: type[Any] = Rows, fit: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    StepBudget.left = property(lambda _: left)
    strategy, held = UnifiedFSDPStrategy(**options), Held()
    done = trained(strategy, held, *callbacks, ranks=2, rank=rank(), kind=kind, **(fit or {"max_epochs": 1}))
    return {**done, "plan": strategy.plan, "held": held.bytes}


class Held(L.Callback):
    """Notes before each batch how many bytes the plan counts as held by the step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        if trainer.strategy.first_step is not None:
            self.bytes.append(trainer.strategy.first_step.budget._held(()))
