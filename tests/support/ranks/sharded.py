"""Runs of `unified_fsdp` on several ranks, and the same training in one process."""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedFSDPStrategy
from tests.support.ranks.runs import quiet

ROWS = 44  # the last batch of eight rows is short


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 16), nn.Linear(16, 7)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Deep(L.LightningModule):
    """Three blocks, layers outside of them, a tied weight, and rows that do not divide by the number of ranks."""

    def __init__(self, *, ranks: int = 1, rank: int = 0, rows: int = ROWS, wide: bool = False) -> None:
        super().__init__()
        self.part, self.rows = (rank, ranks), rows
        self.embed, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
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


def ranks_of(trainer: L.Trainer) -> int:
    return trainer.world_size


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
    if tests:
        metrics |= {name: float(value) for name, value in trainer.test(module, verbose=False)[0].items()}
    policy = getattr(trainer.strategy, "policy", None)
    return {
        "weights": torch.cat([whole(parameter).flatten() for parameter in module.parameters()]),
        "metrics": metrics,
        "seen": module.seen,
        "steps": trainer.global_step,
        "recoveries": None if policy is None else policy.recoveries,
        "events": None if policy is None else policy.events,
        "largest": None if policy is None else policy.sizing.micro_batch_size,
    }


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach().cpu()


def local_rank() -> int:
    import os

    return int(os.environ["LOCAL_RANK"])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped windows": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "wide": {"module": {"wide": True}, "max_epochs": 1, "gradient_clip_val": 0.05},
}


def sharded(size: int, name: str, **arguments: Any) -> dict[str, Any]:
    return trained(UnifiedFSDPStrategy(**arguments), ranks=size, rank=local_rank(), tests=True, **SETTINGS[name])


def alone(name: str, **options: Any) -> dict[str, Any]:
    return trained("auto", ranks=1, rank=0, tests=True, **SETTINGS[name], **options)
