"""Small modules that two ranks train.

The ranks have equal or different modules, with batches of equal or different sizes. Some modules fail on one rank only, or
communicate inside a step.
"""

import os
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics.classification import MulticlassAccuracy

from lightning_unified import MicroBatchRules

TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


class Rows(Dataset):
    """Rows that are the same in every run."""

    dtype = torch.float64

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 6, generator=generator, dtype=self.dtype)
        self.y = torch.randint(4, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(L.LightningModule):
    """A net of small and large parameters.

    Their gradients are reduced in place and together.
    """

    def __init__(self, **kinds: bool) -> None:
        super().__init__()
        self.kinds = kinds
        self.seen: list[float] = []
        layers = [nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 4)]
        if kinds.get("norm"):
            layers.insert(1, nn.BatchNorm1d(400))
        if kinds.get("dropout"):
            layers.insert(1, nn.Dropout(0.3))
        self.net = nn.Sequential(*layers)
        if kinds.get("unused"):
            self.extra, self.never = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        if self.kinds.get("unused") and rank() == 1:
            logits = logits + self.extra(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch["x"]), batch["y"]), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02, fused=False, foreach=True)


class OwnData:
    """Marks a module that has its own loader."""


class RaggedNet(OwnData, Net):
    """A module with batches of different sizes on the ranks."""

    def train_dataloader(self):
        own = [range(32), range(32, 44)][rank()]
        return DataLoader(Subset(Rows(44), own), batch_size=[8, 3][rank()])


class Blocks(OwnData, L.LightningModule):
    """Activations that outweigh the weights, in blocks that can be recomputed.

    No two ranks share a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), *[nn.Tanh()] * 6) for _ in range(2))

    def train_dataloader(self):
        rows = torch.randn(32, 64, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(rows[rank() :: 2], batch_size=16)

    def training_step(self, batch, batch_idx):
        hidden = batch
        for block in self.blocks:
            hidden = (hidden + block(hidden)).tanh()
        return hidden.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ManualNet(Net):
    """A module that steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Tokens(OwnData, L.LightningModule):
    """Mean over scored tokens; their number differs between ranks and batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    @staticmethod
    def rows() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(11, (16, 9), generator=generator)
        labels = tokens.roll(-1, 1)
        for row in range(16):
            labels[row, row % 8 :] = -100
        return tokens, labels

    def train_dataloader(self):
        tokens, labels = self.rows()
        rows = [{"tokens": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]
        return DataLoader(rows[rank() :: 2], batch_size=4)

    def loss(self, tokens, labels):
        return F.cross_entropy(self.head(self.embed(tokens).cumsum(1)).flatten(0, 1), labels.flatten())

    def configure_micro_batches(self, stage):
        return MicroBatchRules(loss_weight=lambda batch: (batch["labels"] != -100).sum())

    def training_step(self, batch, batch_idx):
        return self.loss(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Broken(Net):
    """A module with an error on one rank only."""

    def training_step(self, batch, batch_idx):
        if rank() == 1 and batch_idx == 2:
            raise KeyError("no such column")
        return super().training_step(batch, batch_idx)


class TooLarge(Net):
    """A module that runs out of memory on one rank at any micro-batch size."""

    def training_step(self, batch, batch_idx):
        if rank() == 1 and batch_idx == 2:
            raise RuntimeError(TEXT)
        return super().training_step(batch, batch_idx)


class Different(Net):
    """A module that differs between ranks."""

    def __init__(self) -> None:
        super().__init__(unused=rank() == 1)


class Gathers(Net):
    def training_step(self, batch, batch_idx):
        self.all_gather(batch["x"])
        return super().training_step(batch, batch_idx)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.embed(batch["y"]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Synced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, dist_sync_on_step=True)


class Sharded(Net):
    def configure_optimizers(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


REFUSED = {"Gathers": Gathers, "Sparse": Sparse, "Synced": Synced, "Sharded": Sharded, "Different": Different}
