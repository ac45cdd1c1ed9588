"""Runs of `unified_fsdp` on several ranks, and the same training in one process."""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedFSDPStrategy
from lightning_unified.errors import LightningUnifiedError
from lightning_unified.step.ranks import consensus
from lightning_unified.strategies import fsdp
from tests.support.ranks.runs import quiet
from tests.support.ranks.shard_faults import Fails, ShrinksAt, local_rank

ROWS, BATCHES = 28, 4  # the last batch of eight rows is short


class Block(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(7, 16), nn.Linear(16, 7), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.second(torch.tanh(self.first(x))))


class Deep(L.LightningModule):
    """Three blocks, layers outside of them, a tied weight, and rows that do not divide by the number of ranks."""

    def __init__(
        self, *, ranks: int = 1, rank: int = 0, rows: int = ROWS, wide: bool = False, drop: float = 0.0
    ) -> None:
        super().__init__()
        self.part, self.rows = (rank, ranks), rows
        self.embed, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.seen: list[float] = []
        if wide:
            self.widen = nn.Sequential(nn.Linear(7, 20000), nn.Tanh(), nn.Linear(20000, 7))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "widen"):
            x = x + self.widen(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True, batch_size=len(batch["tokens"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02, foreach=True)

    def _loader(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(11, (self.rows, 5), generator=generator)
        labels = torch.randint(11, (self.rows, 5), generator=generator)
        rank, ranks = self.part
        rows = [{"tokens": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]
        return DataLoader(rows[rank::ranks], batch_size=8 // ranks)

    def train_dataloader(self):
        return self._loader()

    def val_dataloader(self):
        return self._loader()

    def test_dataloader(self):
        return self._loader()


def trained(
    strategy: Any, *callbacks: L.Callback, ranks: int, rank: int, kind: type[Deep] = Deep, seed: int = 7, **options: Any
) -> dict[str, Any]:
    """Return whole weights and logged values after a fit on `ranks` ranks."""
    quiet()
    torch.manual_seed(seed)
    module = kind(ranks=ranks, rank=rank, **options.pop("module", {})).double()
    torch.manual_seed(20 + rank)
    checkpoint, tests = options.pop("ckpt_path", None), options.pop("tests", False)
    options = {"enable_checkpointing": False, "precision": "64-true", "max_epochs": 2, **options}
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint, weights_only=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    policy = getattr(trainer.strategy, "policy", None)
    largest = None if policy is None else policy.sizing.micro_batch_size
    if tests:
        metrics |= {name: float(value) for name, value in trainer.test(module, verbose=False)[0].items()}
    return {
        "weights": torch.cat([whole(parameter).flatten() for parameter in module.parameters()]),
        "metrics": metrics,
        "seen": module.seen,
        "steps": trainer.global_step,
        "recoveries": None if policy is None else policy.recoveries,
        "events": None if policy is None else policy.events,
        "largest": largest,
    }


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach().cpu()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 1},
    "clipped windows": {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "wide": {"module": {"wide": True}, "max_epochs": 1, "gradient_clip_val": 0.05},
}


def run(size: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(**arguments), ranks=size, rank=local_rank(), tests=True, **SETTINGS[name])


def alone(name: str, **options: Any) -> dict[str, Any]:
    return trained("auto", ranks=1, rank=0, tests=True, **SETTINGS[name], **options)


FEW = ROWS
STEP = {"max_epochs": 1, "gradient_clip_val": 0.05, "tests": True}


def recovered(*phases: str, hold: Any = "auto", rollback: bool = True) -> dict[str, dict[str, Any]]:
    """Return fits in which the second rank runs out of memory once, and their undisturbed twins."""
    fits: dict[str, dict[str, Any]] = {}
    for phase in phases:
        event = {"undisturbed": [], "smaller": [ShrinksAt(2)]}.get(phase, [Fails(phase)])
        strategy = UnifiedFSDPStrategy(hold=hold, optimizer_rollback=rollback)
        fits[phase] = trained(strategy, *event, ranks=2, rank=local_rank(), module={"drop": 0.3, "rows": FEW}, **STEP)
    return fits


class OwnSize(L.Callback):
    """Gives the first rank another micro-batch size than the second, which ranks that share sizes never have."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.sizes.max_micro_batch_size = (1, 3)[local_rank()]
        trainer.strategy.policy.compare = lambda words: None


def different_sizes() -> dict[str, Any]:
    settings = SETTINGS["clipped windows"]
    return trained(UnifiedFSDPStrategy(), OwnSize(), ranks=2, rank=local_rank(), tests=True, **settings)


class Manual(Deep):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False


class Quasi(Deep):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Partly(Deep):
    def configure_model(self):
        if not isinstance(self.blocks[0], FSDPModule):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh)


class ShardsItself(Deep):
    """Shards two blocks together."""

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            fully_shard(self.blocks[2], mesh=self.device_mesh)
            fully_shard(self, mesh=self.device_mesh)

    def on_train_start(self):
        assert not isinstance(self.blocks[0], FSDPModule)


def sharded_by_module() -> dict[str, Any]:
    return trained(
        UnifiedFSDPStrategy(), ranks=2, rank=local_rank(), kind=ShardsItself, tests=True, **SETTINGS["plain"]
    )


def refusals() -> dict[str, str]:
    """Return the refusal of each module."""
    cases: dict[str, dict[str, Any]] = {
        "manual": {"kind": Manual},
        "16-mixed": {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
        "LBFGS": {"kind": Quasi},
        "partly sharded": {"kind": Partly},
    }
    return {name: _refusal(**options) for name, options in cases.items()}


def _refusal(*, strategy: dict[str, Any] | None = None, **options: Any) -> str:
    try:
        trained(UnifiedFSDPStrategy(**(strategy or {})), ranks=2, rank=local_rank(), **options)
    except (LightningUnifiedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def without_copies() -> Any:
    return recovered("half written", rollback=False)


def recovered_shards(*phases: str) -> dict[str, dict[str, Any]]:
    return recovered(*phases, hold="shards")


class Forks(Deep):
    """Leaves a block out on one rank."""

    def forward(self, tokens):
        if self.part[0] == 1 and self.trainer.global_step == 2:
            return self.head(self.norm(self.blocks[0](self.embed(tokens))))
        return super().forward(tokens)


def different_paths() -> Any:
    return trained(UnifiedFSDPStrategy(hold="shards"), ranks=2, rank=local_rank(), kind=Forks)


class Ends(L.Callback):
    """Ends one rank's process in the middle of a backward pass, without an error."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if local_rank() == 1 and batch_idx == 2:
            module.blocks[1].register_full_backward_hook(lambda *_: os._exit(7))


def dying(hold: Any) -> Any:
    consensus._ROLL_CALL_S = 0.5
    return trained(UnifiedFSDPStrategy(hold=hold), Ends(), ranks=2, rank=local_rank())


def chosen() -> tuple[str, str]:
    """Return what ranks hold with a large budget, and with a small one on the second rank."""
    held = []
    for whole in (False, True):
        strategy = UnifiedFSDPStrategy()
        if whole and local_rank() == 1:
            fsdp.bytes_of_whole = lambda *_, **__: 2**62
        trained(strategy, ranks=2, rank=local_rank(), max_steps=1, max_epochs=-1)
        held.append(strategy.holds)
    return held[0], held[1]
