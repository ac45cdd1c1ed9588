"""Sums over all entries that are divided by the number of a few of them split exactly."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import same_cut_and_whole

ROWS = 96


def loader(share, shape=(), dtype=torch.float64, seed=0):
    """Return batches of 16 rows of inputs and of labels, a `share` of which is positive."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    positive = torch.rand(ROWS, *shape, generator=generator) < share
    return DataLoader(TensorDataset(x, positive.to(dtype)), batch_size=16)


class Focal(Net):
    """Divides the focal loss of all rows by the number of positive ones."""

    def training_step(self, batch, batch_idx):
        x, labels = batch
        out = self.net(x)[:, 0] if labels.dim() == 1 else self.net(x)[:, : labels.shape[1]]
        loss = self.loss(out, labels.to(out))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, out, labels):
        each = F.binary_cross_entropy_with_logits(out, labels, reduction="none")
        return (each * (out.sigmoid() - labels).square()).sum() / (labels > 0).sum().clamp(min=1)


class Boxes(Focal):
    """Adds the errors of positive entries alone, divided by the same number."""

    def loss(self, out, labels):
        errors = (out[labels > 0] - 1).abs().sum() / max(int((labels > 0).sum()), 1)
        self.log("errors", errors)
        return super().loss(out, labels) + errors


@first_cells(
    4,
    ("kind", "share", "shape", "size"),
    [
        (Focal, 0.1, (), 5),  # micro-batches of the checked rows lack positive ones
        (Focal, 0.25, (), 3),  # only micro-batches of the first batch do
        (Focal, 0.05, (4,), 3),
        (Boxes, 0.05, (4,), 5),
        *((kind, share, (4,), size) for kind in (Focal, Boxes) for share in (0.03, 0.1, 0.2) for size in (3, 5)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sum_over_all_entries_divided_by_at_least_one_splits_exactly(kind, share, shape, size, seed):
    same_cut_and_whole(kind, size=size, loader=lambda: loader(share, shape, seed=seed), max_epochs=2)


@first_cells(1, "share", [0.25, 0.1])
def test_whole_numbers_above_0_count_as_at_least_one(share):
    same_cut_and_whole(Focal, size=3, loader=lambda: loader(share, dtype=torch.int64), max_epochs=2)
