"""Code for training in modules with a dropout rate of their own.

A run without dropout has them in eval mode.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.recovery.undone_run import only_drops
from tests.support.modules.split import Net, run


class WithRate(Net):
    """Has a dropout rate, and from the second epoch on a term of all rows where it trains."""

    def __init__(self):
        super().__init__()
        self.dropout = 1e-6

    def loss(self, out, batch):
        out = F.dropout(out, self.dropout, self.training)
        loss = F.cross_entropy(out, batch["y"])
        if self.training and self.current_epoch:
            loss = loss + (out.T @ out / len(out) - torch.eye(4)).square().mean()
        return loss


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_rate, self.is_on, self.layer = 1e-6, False, nn.Linear(16, 16)

    def forward(self, x):
        x = F.dropout(self.layer(x), self.drop_rate, self.training)
        return x - x.mean(0) if self.is_on and self.training else x


class WithBlock(Net):
    def make_middle(self):
        return Centres()

    def on_train_epoch_start(self):
        self.net[1].is_on = self.current_epoch > 0


class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_prob = 0.1


@pytest.mark.parametrize("kind", [WithRate, WithBlock])
def test_code_for_training_that_begins_late_is_refused(kind):
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(kind, strategy=UnifiedStrategy(micro_batch_size=3), max_epochs=2)


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        (nn.Dropout(), True),
        (nn.MultiheadAttention(4, 1, dropout=0.1), True),
        (DropPath(), True),
        (Centres(), False),
        (WithRate(), False),
    ],
)
def test_only_bare_modules_and_torchs_own_do_nothing_but_drop(child, expected):
    assert only_drops(child) is expected
