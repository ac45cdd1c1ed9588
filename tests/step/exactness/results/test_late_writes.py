"""State that only a later micro-batch of a batch writes is checked before the update."""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.modules.plain import fit, weights
from tests.support.modules.split import Net
from tests.support.modules.writing import Writes

MARKED = 23  # a row of the last micro-batch of the third batch, before which no check is due


class Late(Writes):
    """Writes a number where the marked row is."""

    number = 0.0

    def __init__(self):
        super().__init__()
        self.done = [[]]  # a number would be a fact about the module

    def write(self, batch, out, loss):
        if (batch["x"][:, 0] > 1).any():
            self.number = self.of(batch, out)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.done[0].append(batch_idx)

    @staticmethod
    def loader(seed=0, dtype=torch.float64):
        loader = Net.loader(seed, dtype)
        for index, row in enumerate(loader.dataset.rows):
            row["x"][0] = 1.5 if index == MARKED else row["x"][0].clamp(-1, 1)
        return loader


class Marked(Late):
    def of(self, batch, out):
        return self.number + float((batch["x"][:, 0] > 1).sum())


class Spread(Late):
    def of(self, batch, out):
        return float(out.std())


def trained(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy)
    return module


def test_a_late_write_that_no_rule_merges_is_refused_before_the_update():
    torch.manual_seed(0)
    module = Spread().double()

    with pytest.raises(SplitError, match=r"writes Spread\.number in its step"):
        fit(module, Spread.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
    assert module.done == [[0, 1]]
    assert module.number == 0.0


def test_a_late_write_that_a_rule_merges_is_the_whole_batchs():
    plain, module = trained(Marked), trained(Marked, UnifiedStrategy(micro_batch_size=3))

    assert module.number == plain.number == 2.0
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)
