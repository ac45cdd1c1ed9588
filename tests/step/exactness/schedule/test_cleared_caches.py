"""Caches that a check filled are cleared after it, and after no other batch."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.strategies import UnifiedStrategy


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Counted(Callback):
    """Notes, after each batch, how often caches were cleared so far."""

    def __init__(self, cleared):
        self.cleared, self.after = cleared, [0]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(len(self.cleared))


def test_caches_are_cleared_after_checks_only(monkeypatch):
    cleared, release = [], BudgetWatch.release
    monkeypatch.setattr(BudgetWatch, "release", lambda self: cleared.append(release(self)))
    counted = Counted(cleared)
    L.Trainer(
        strategy=UnifiedStrategy(simulate="h200", micro_batch_size=4), callbacks=[counted], max_steps=16,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Regression(), DataLoader(torch.randn(16 * 16, 8), batch_size=16))  # fmt: skip

    assert {at for at in range(1, 17) if counted.after[at] > counted.after[at - 1]} == {1, 2, 4, 8, 16}
