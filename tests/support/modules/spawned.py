"""A data module with spawned worker processes, and modules that train on it.

The workers import this module by name.
"""

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from lightning_unified.models.gearhead import GearHead
from tests.support.modules.plain import MLP


class Spawned(L.LightningDataModule):
    """Collates by a bound method, so that workers need the data module and its Trainer.

    Args:
        start: How worker processes start; None loads in the training process.
        batch: Rows of a batch.
        validates: Whether there are batches to validate on as well.
    """

    def __init__(self, start: str | None, *, batch: int = 8, validates: bool = False) -> None:
        super().__init__()
        self.start, self.batch, self.validates = start, batch, validates
        self.rows = self.make_rows()

    def make_rows(self):
        return MLP.loader().dataset

    def collate(self, rows):
        assert self.trainer.max_epochs == 2  # the Trainer is there, and can be asked
        return default_collate(rows)

    def train_dataloader(self):
        workers = {} if self.start is None else {"num_workers": 1, "multiprocessing_context": self.start}
        return DataLoader(
            self.rows,
            batch_size=self.batch,
            collate_fn=self.collate,
            persistent_workers=self.start is not None and not self.validates,  # such a loader cannot be sent itself
            **workers,
        )

    def val_dataloader(self):
        return self.train_dataloader() if self.validates else []


class SpawnedTokens(Spawned):
    """Token rows for a small GearHead."""

    def make_rows(self):
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(9, 64, (14, 16), generator=generator)
        labels = tokens.clone()
        for row in range(len(tokens)):
            labels[row, 3 + row :] = -100
        asked, codes = torch.full_like(tokens, -100), torch.zeros_like(tokens)
        asked[::2, 2] = 1
        names = ("input_ids", "labels", "error_code_ids", "diagnosis_labels")
        return [dict(zip(names, row, strict=True)) for row in zip(tokens, labels, codes, asked, strict=True)]


class ValidatedMLP(MLP):
    """Logs a figure of each validation batch.

    No metric of this module keeps a graph, because a graph cannot be sent to a worker.
    """

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"])
        self.accuracy(logits, batch["y"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log_dict({"loss": loss, "accuracy": self.accuracy}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.net(batch["x"]).square().mean())


def gearhead() -> GearHead:
    return GearHead(
        preset="gearhead-small", vocabulary=64, positions=16, width=16, layers=2, heads=2, feed_forward=32, dropout=0.0
    )
