"""A module, a batch and a loader, which readers of the manual have of their own.

A block of a page imports them in its `setup` comment.
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_unified
from lightning_unified import MicroBatchRules, UnifiedDDPStrategy, UnifiedStrategy

__all__ = [
    "DataLoader", "F", "L", "MicroBatchRules", "MyLayer", "MyModule", "UnifiedDDPStrategy", "UnifiedStrategy", "batch", "lightning_unified",
    "loader", "module", "nn", "torch",
]  # fmt: skip


class MyLayer(nn.Module):
    """A residual block of width 512."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.lift(x).relu())


class MyModule(L.LightningModule):
    """A small classifier of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


module = MyModule()
rows = [{"x": torch.randn(8), "y": torch.tensor(row % 3)} for row in range(64)]
loader = DataLoader(rows, batch_size=16)
batch = next(iter(loader))
