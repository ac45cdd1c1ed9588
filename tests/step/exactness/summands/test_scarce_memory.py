"""A sum of means whose check lacks memory on the device is checked on the host."""

import logging

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from tests.support.modules.plain import weights
from tests.support.runs.split_and_whole import EXACT, run

HEADS, PLACES = 6, 16


class Heads(L.LightningModule):
    """Six heads with labels of their own: a check keeps the gradient of each in each of its runs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.heads = nn.ModuleList(nn.Linear(64, 8) for _ in range(HEADS))

    def training_step(self, batch, batch_idx):
        hidden = self.body(batch[0])
        scores = [head(hidden).flatten(0, 1) for head in self.heads]
        return sum(
            F.cross_entropy(one, of.flatten(), ignore_index=-1) for one, of in zip(scores, batch[1:], strict=True)
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @staticmethod
    def loader():
        draws = torch.Generator().manual_seed(1)
        x = torch.randn(24, PLACES, 64, generator=draws).double()
        labels = torch.randint(0, 8, (24, HEADS, PLACES), generator=draws)
        shares = torch.rand(24, HEADS, 1, generator=draws)
        labels[torch.rand(24, HEADS, PLACES, generator=draws) < shares] = -1
        labels[:, :, 0] = 2
        return DataLoader(list(zip(x, *labels.unbind(1), strict=True)), batch_size=12)


def test_a_sum_of_means_splits_exactly_where_its_check_lacks_memory(caplog):
    whole, *_ = run(Heads, "auto", max_epochs=1)
    strategy = UnifiedStrategy(micro_batch_size=3, budget="4MiB", simulate="rtx3060-12gb", predict=False)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        split, *_ = run(Heads, strategy, max_epochs=1)

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)
    assert "It runs on the CPU now" in caplog.text
    assert "unchecked" not in caplog.text
