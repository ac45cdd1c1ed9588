"""A check in which a single micro-batch has a gradient decides little, so the next batches are checked too."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, found, run


class Hits(Net):
    """Its loss is over a few rows of the batch."""

    def loss(self, out, batch):
        each = F.cross_entropy(out, batch["y"], reduction="none")
        return self.of_hits(each, batch["hit"] > 0.5)


class MeanOfHits(Hits):
    def of_hits(self, each, hit):
        return (each * hit).sum() / hit.sum().clamp(min=1)


class SumOfHits(Hits):
    def of_hits(self, each, hit):
        return (each * hit).sum() / 10


def loader(*places, kind=int):
    """Return batches of 8 rows, split into 3, 3 and 2, with hits at the given (batch, row); no hit is -1."""
    off = 0 if kind is int else -1.0
    return batches(
        number=12, size=8, change=lambda batch, row: {"hit": torch.tensor(kind(1 if (batch, row) in places else off))}
    )


RARE = ((0, 4), (1, 4), (2, 3), (2, 7), (4, 0), (4, 6), (7, 1), (7, 4), (7, 5), (9, 2))


@first_cells(1, "kind", [MeanOfHits, SumOfHits])
def test_a_loss_of_rare_rows_equals_plain_lightnings(kind):
    plain, _ = run(kind, loader(*RARE), strategy="auto")
    split, trainer = run(kind, loader(*RARE))

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-11)
    assert not found(trainer).startswith("rows")


@first_cells(1, "places", [((0, 5), (0, 7)), ((0, 5), (1, 5), (1, 7))])
def test_a_mean_of_rare_rows_that_looks_like_a_sum_is_refused_before_its_update(places):
    with pytest.raises(SplitError, match="MeanOfHits cannot be split exactly"):
        run(MeanOfHits, loader(*places, kind=float))


@pytest.mark.slow
def test_checks_become_rare_once_two_micro_batches_had_a_gradient(checks):
    run(SumOfHits, loader((0, 4), (1, 4), (2, 3), (2, 7), *[(batch, 5) for batch in range(3, 12)], kind=float))

    assert checks.steps == [0, 1, 2, 3, 7]
