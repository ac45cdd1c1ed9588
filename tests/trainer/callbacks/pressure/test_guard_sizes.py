"""Under memory pressure, micro-batches shrink and grow back, and training stays the same."""

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import MicroBatchRules, UnifiedStrategy
from tests.support.lasting import Lasting
from tests.trainer.callbacks.pressure.guards import Scripted, actions

pytestmark = pytest.mark.filterwarnings("ignore")


class Exact(LightningModule):
    """Linear layers in float64 and batches of eight rows.

    `rows` lists the rows of every run of `training_step`.
    """

    rows = Lasting(())

    def __init__(self, *, splittable=True):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.splittable = splittable

    def configure_micro_batches(self, stage):
        return MicroBatchRules(splittable=self.splittable)

    def training_step(self, batch, batch_idx):
        self.rows += (len(batch[0]),)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def exact_batches(count=10):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(8 * count, size, generator=generator, dtype=torch.float64) for size in (5, 1))
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit_exact(folder, *callbacks, splittable=True, strategy=None):
    module, strategy = Exact(splittable=splittable), strategy or UnifiedStrategy()
    trainer = Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, exact_batches())
    return module, trainer


def test_a_micro_batch_that_shrinks_and_grows_back_learns_the_same(tmp_path, by_hand):
    plain, _ = fit_exact(tmp_path / "a")
    module, trainer = fit_exact(
        tmp_path / "b",
        Scripted("critical", "critical", "critical", "critical", "critical", "critical", "normal"),
        strategy=UnifiedStrategy(check_split=False),  # the exactness check would run further rows
    )

    assert actions(tmp_path / "b")[:6] == [
        "noticed",
        "warned",
        "caches cleared",
        "micro-batch shrunk to 4 rows",
        "over",
        "down to rung 2 of 5, micro-batch grown to 8 rows",
    ]
    assert (trainer.strategy.effective_batch_size, trainer.strategy.micro_batch_size) == (8, 8)
    assert module.rows == (8,) * 3 + (4,) * 6 + (8,) * 4
    assert "memory pressure is over" in trainer.strategy.plan.reasons["micro_batch_size"]
    assert plain.rows == (8,) * 10
    assert trainer.global_step == 10
    for name, weight in plain.state_dict().items():
        assert torch.allclose(weight, module.state_dict()[name], rtol=0, atol=1e-12), name


def test_a_module_that_cannot_be_split_is_left_whole_and_the_next_rung_is_taken(tmp_path, by_hand):
    module, _ = fit_exact(tmp_path, Scripted("critical", stop=False), splittable=False)

    assert set(module.rows) == {8}
    assert actions(tmp_path)[3:] == [
        "shrink skipped: UnifiedStrategy cannot split its batches further",
        "checkpoint saved: pressure.ckpt",
    ]
