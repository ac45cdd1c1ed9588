"""A dict by number of rows is a cache if its entries depend on nothing else."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.tables import Tables
from tests.support.modules.plain import fit, weights
from tests.support.modules.split import Net


class Masked(Net):
    """Weights its rows by a mask that it keeps for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def training_step(self, batch, batch_idx):
        rows = len(batch["x"])
        if self.key(rows) not in self.kept:
            self.kept[self.key(rows)] = self.mask(batch["x"])
        losses = F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none")
        return (self.kept[self.key(rows)] * losses).mean() if self.is_read else losses.mean()

    is_read = True

    def key(self, rows):
        return rows

    def mask(self, x):
        return x.new_full((len(x),), 0.5)


class ByTuple(Masked):
    def key(self, rows):
        return rows, "cpu"


class FromData(Masked):
    is_read = False

    def mask(self, x):
        return x[:, 0].mean()


class Random(Masked):
    is_read = False

    def mask(self, x):
        return torch.rand(())


class ByLabel(Masked):
    """Has entries that the number of rows does not name."""

    is_read = False

    def key(self, rows):
        return rows + 100


def trained(kind, strategy="auto"):
    torch.manual_seed(0)
    module = kind().double()
    fit(module, kind.loader(), strategy=strategy)
    return module


@pytest.mark.parametrize("kind", [Masked, ByTuple])
def test_a_cache_by_number_of_rows_is_kept_and_named_once(kind, caplog):
    module, plain = trained(kind, UnifiedStrategy(micro_batch_size=3)), trained(kind)

    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-12, atol=1e-14)
    assert set(module.kept) == {module.key(2), module.key(3)}
    said = [record.message for record in caplog.records if "for the rows of micro-batches" in record.message]
    assert len(said) == 1
    assert said[0].startswith(f"{kind.__name__}.kept gets entries")


@pytest.mark.parametrize("kind", [FromData, Random, ByLabel])
def test_other_entries_that_only_the_whole_batch_makes_are_refused(kind):
    torch.manual_seed(0)

    with pytest.raises(SplitError, match=rf"writes {kind.__name__}\.kept\["):
        fit(kind().double(), kind.loader(), strategy=UnifiedStrategy(micro_batch_size=5))


def test_caches_are_remembered_by_a_resumed_run():
    tables, other = Tables(), Tables()
    tables.note_sized(["Net.kept[8]", "Net.kept[3]"])
    other.load_state_dict(tables.state_dict())

    assert other.sized == {"Net.kept"}
    other.load_state_dict({key: value for key, value in tables.state_dict().items() if key != "sized"})
    assert other.sized == set()
