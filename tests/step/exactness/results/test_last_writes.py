"""The last write of an entry of a memory bank counts, as in the whole batch."""

import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.state.last_writes import keeps_last_writes, learn_last_writes
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.writing import Writes
from tests.support.runs.schedules import batches, run


class Bank(Writes):
    """Keeps the last output of each id; the first and the last row of batch 5 have one id."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(400, 4))

    def write(self, batch, out, loss):
        self.bank[batch["id"]] = out


class AddedBank(Bank):
    def write(self, batch, out, loss):
        self.bank.index_add_(0, batch["id"], out)


def loader():
    return batches(number=8, size=40, change=lambda batch, row: {"id": 40 * batch + row * ((batch, row) != (5, 39))})


@first_cells(1, "kind", [Bank, AddedBank])
def test_an_entry_that_two_micro_batches_write_is_the_whole_batchs(kind):
    whole, _ = run(kind, loader(), strategy="auto")
    split, _ = run(kind, loader(), strategy=UnifiedStrategy(micro_batch_size=18))

    torch.testing.assert_close(split.bank, whole.bank, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=1e-10)


def learnt(*writes, whole):
    table, before = MergeTable(), torch.zeros(3)
    learn_last_writes(table, "bank", before, torch.tensor(whole), [torch.tensor(one) for one in writes], tolerance=0.0)
    assert not table.unmergeable
    return keeps_last_writes(table, "bank")


def test_the_last_write_of_each_entry_is_learnt_from_writes_of_some_entries():
    assert learnt([1.0, 2.0, 0.0], [0.0, 3.0, 0.0], whole=[1.0, 3.0, 0.0])
    assert not learnt([1.0, 2.0, 0.0], [0.0, 3.0, 0.0], whole=[1.0, 5.0, 0.0])
    assert not learnt([1.0, 2.0, 4.0], [1.0, 3.0, 5.0], whole=[1.0, 3.0, 5.0])


def test_a_refuted_last_write_stays_refuted():
    table, before, one = MergeTable(), torch.zeros(2), torch.tensor([1.0, 0.0])
    for whole in (2 * one, one):
        learn_last_writes(table, "bank", before, whole, [one, one], tolerance=0.0)

    assert not keeps_last_writes(table, "bank")
