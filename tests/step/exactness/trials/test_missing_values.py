"""Losses over values that are not missing: missing ones are NaN in the batch."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import weights
from tests.support.modules.split import Net
from tests.support.runs.split_and_whole import EXACT, run

GENERATOR = torch.Generator().manual_seed(0)
ROWS = 48
X = torch.randn(ROWS, 6, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(ROWS, 4, generator=GENERATOR, dtype=torch.float64)
TARGETS[torch.rand(ROWS, 4, generator=GENERATOR) < 0.3] = torch.nan
TARGETS[22:28] = torch.nan  # a micro-batch of the second batch
LATE = torch.randn(ROWS, 6, generator=GENERATOR, dtype=torch.float64)
LATE[37, 2] = LATE[38, 1:3] = LATE[45] = torch.nan  # all of the third batch


class Missing(Net):
    fields = (X, TARGETS)

    @classmethod
    def loader(cls):
        return DataLoader(list(zip(*cls.fields, strict=True)), batch_size=16)

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)


class Entries(Missing):
    """Its loss is a mean over the targets that a row has, as in learning of several tasks."""

    def loss(self, inputs, targets):
        has_value = ~targets.isnan()
        return F.mse_loss(self.net(inputs)[:, :4][has_value], targets[has_value])


class Filled(Missing):
    def loss(self, inputs, targets):
        squares = (self.net(inputs)[:, :4] - targets.nan_to_num()).square() * targets.isfinite()
        return squares.sum() / targets.isfinite().sum().clamp(min=1)


class Rows(Missing):
    """Its loss leaves out rows with a missing input."""

    fields = (LATE, X)

    def loss(self, inputs, targets):
        is_full = ~inputs.isnan().any(1)
        return F.mse_loss(self.net(inputs[is_full])[:, :4], targets[is_full, :4])


class FilledInputs(Missing):
    """Missing inputs become zeros, so that its loss is a mean over all rows."""

    fields = (LATE, X)

    def loss(self, inputs, targets):
        return F.mse_loss(self.net(inputs.nan_to_num())[:, :4], targets[:, :4])


@first_cells(2, "kind", [Entries, Rows, Filled, FilledInputs])
@pytest.mark.parametrize("size", [3, 6])
def test_losses_over_values_that_are_not_missing_split_exactly(kind, size):
    whole, *_ = run(kind, "auto")
    split, *_ = run(kind, UnifiedStrategy(micro_batch_size=size))

    torch.testing.assert_close(weights(split), weights(whole), **EXACT)


class Skipping(Missing):
    """It skips a batch whose loss is not finite."""

    fields = (LATE, X)

    def loss(self, inputs, targets):
        loss = F.mse_loss(self.net(inputs)[:, :4], targets[:, :4])
        return loss if loss.isfinite() else None


def test_the_refusal_of_a_skipped_batch_says_that_all_rows_were_skipped():
    with pytest.raises(SplitError, match="returned None for all of these rows, and a loss for some micro-batches"):
        run(Skipping, UnifiedStrategy(micro_batch_size=6))
