"""A check that decides nothing is followed by further ones."""

import pytest
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.split import Net, Zero
from tests.support.runs.schedules import batches, found, run


class Frozen(Net):
    """Its gradient is zero while a flag of the batch is."""

    def loss(self, out, batch):
        return super().loss(out, batch) * batch["on"].mean()


@first_cells(1, ("zeros", "decided"), [(1, 1), (2, 2), (5, 5)])
def test_an_undecided_batch_is_followed_by_a_check_of_the_next(zeros, decided, checks):
    _, trainer = run(Frozen, batches(change=lambda batch, row: {"on": float(batch >= zeros)}, number=zeros + 2))

    assert decided in checks.steps
    assert found(trainer).startswith("rows: ")


class ZeroForMany(Net):
    """Its gradient is zero for more than four rows."""

    def loss(self, out, batch):
        return super().loss(out, batch) * (len(out) <= 4)


def test_a_whole_gradient_of_zero_is_compared_with_micro_batches_that_have_one():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(ZeroForMany, batches(number=1))


class HardestTenth(Net):
    """A tenth of eight rows is none."""

    def loss(self, out, batch):
        losses = F.cross_entropy(out, batch["y"], reduction="none")
        return losses.topk(len(out) // 10).values.sum()


def test_rows_whose_gradient_says_nothing_are_followed_by_more():
    with pytest.raises(SplitError, match="the gradient of 24 rows differs"):
        run(HardestTenth, batches(number=1, size=24))


@pytest.mark.slow
def test_what_stays_undecided_is_checked_ever_more_rarely(checks):
    run(Zero, batches(number=40))

    assert checks.steps == [0, 1, 2, 3, 7, 15, 31]
