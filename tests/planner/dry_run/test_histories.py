"""The history of LBFGS counts in full, although a first step has none."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import predict
from lightning_unified.planner.dry_run.histories import fill_histories

BATCH = torch.zeros(8, 16)


class Fitted(L.LightningModule):
    def __init__(self, history):
        super().__init__()
        self.net, self.history = nn.Linear(16, 256), history

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, history_size=self.history, max_iter=4)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_longer_history_takes_its_bytes(device):
    short, long = (predict(Fitted(history), BATCH, device=device).peak_bytes for history in (5, 30))
    bytes_of_weights = sum(4 * one.numel() for one in Fitted(5).parameters())

    assert long - short == pytest.approx(2 * 25 * bytes_of_weights, rel=0.05)


def test_a_filled_history_is_as_long_as_a_trained_one():
    weights = {
        one: nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(0))) for one in ("trained", "filled")
    }
    optimizers = {name: torch.optim.LBFGS([one], lr=0.1, history_size=6, max_iter=2) for name, one in weights.items()}
    for name, steps in (("trained", 9), ("filled", 1)):
        for _ in range(steps):
            optimizers[name].step(lambda name=name: loss_of(weights[name]))
    fill_histories([optimizers["filled"]])

    trained, filled = (optimizers[name].state[one] for name, one in weights.items())
    for name in ("old_dirs", "old_stps", "ro"):
        assert [one.shape for one in filled[name]] == [one.shape for one in trained[name]]
        assert len(filled[name]) == 6


def loss_of(weight):
    weight.grad = None
    loss = (weight.pow(4) + weight.cos()).sum()
    loss.backward()
    return loss
