"""A check that decides nothing is followed by further ones."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
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


class Clipped(Net):
    """Its loss is clipped, but for that of a few rows of batch 5."""

    def loss(self, out, batch):
        return self.clipped(
            (F.cross_entropy(out, batch["y"], reduction="none") * (10 * (batch["cost"] - 1.4)).exp()).mean()
        )

    def clipped(self, loss):
        return loss.clamp(max=1)


class Skipped(Clipped):
    def clipped(self, loss):
        return (loss - loss.detach()) * (loss.detach() < 1)


def costs(*, cheap):
    """Return batches whose rows have one cost, but for the cheap ones of batch 5, of the same size and sign."""

    def cost(batch, row):
        return {"cost": torch.tensor(1.1 if batch == 5 and row in cheap else 1.5 + 0.01 * row).double()}

    return batches(number=7, change=cost)


@first_cells(1, ("kind", "cheap"), [(Clipped, range(6, 8)), (Skipped, range(3)), (Clipped, range(3, 8))])
def test_the_first_gradient_after_undecided_checks_is_checked_before_its_update(kind, cheap, checks):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, costs(cheap=cheap))

    assert checks.steps[-1] == 5


def test_a_gradient_that_begins_in_all_micro_batches_is_split():
    loader = costs(cheap=range(8))
    split, trainer = run(Clipped, loader)
    whole, _ = run(Clipped, loader, strategy="auto")

    assert found(trainer).startswith("rows: ")
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-10, atol=1e-12)


class PositivesOnly(Net):
    """Its gradient is zero whole; that of few rows is not."""

    def loss(self, out, batch):
        return F.cross_entropy(out, batch["y"]) * ((batch["y"] == 1).all() if len(out) < 3 else 0)


def test_weights_of_0_explain_no_whole_gradient_of_zero():
    with pytest.raises(SplitError, match="cannot be split exactly"):
        run(PositivesOnly, batches(number=1, change=lambda batch, row: {"y": int(row < 2 or row > 5)}))


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
