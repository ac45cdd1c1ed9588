"""A module of three blocks whose activations fit in memory for few rows."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy

TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Replace the collection of a whole session's garbage after each error: it is slow."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)
        # attributes nearer to the block count first runs only
        self._counted = SimpleNamespace(by=SimpleNamespace(runs=0))

    @property
    def runs(self):
        return self._counted.by.runs

    def forward(self, x):
        self._counted.by.runs += 1
        return x + self.drop(self.norm(self.linear(x)).relu())


class Deep(L.LightningModule):
    """A module without code for recomputation.

    Memory holds `room` rows with kept activations, and three times as many without.
    """

    def __init__(self, room=None, norm=True):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)
        self.room = room
        if not norm:
            for layer in self.layers:
                layer.norm = nn.LayerNorm(6)

    @property
    def recomputes(self):
        return "forward" in vars(self.layers[0])

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x)
        if self.training and self.room is not None and len(batch) > self.room * (3 if self.recomputes else 1):
            raise RuntimeError(TEXT)
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


class Pairs(Deep):
    """Every row is compared with every other one, and it says so nowhere."""

    def __init__(self, room=None):
        super().__init__(room, norm=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + nn.functional.cross_entropy(self.head(batch) @ self.head(batch).T, torch.arange(len(batch)))


class Switch(Deep):
    recompute = False

    @property
    def recomputes(self):
        return self.recompute


def fit(module, strategy, *, rows=8, batches=3, callbacks=(), **options):
    torch.manual_seed(2)
    data = torch.randn(rows * batches, 6)
    defaults = {"enable_checkpointing": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    trainer.fit(module, DataLoader(data, rows))
    return trainer


def trained(kind=Deep, *args, recompute, strategy=None, **options):
    torch.manual_seed(1)
    module = kind(*args)
    trainer = fit(module, UnifiedStrategy(recompute=recompute, **(strategy or {})), **options)
    return module, [*module.state_dict().values(), torch.get_rng_state()], trainer
