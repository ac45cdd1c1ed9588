"""Gradients that are not finite, beside losses that are, are checked: the whole batch may have others."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.step.exactness.gradients import are_finite
from tests.support.lanes import crossed

ROWS = 12


class Rare(L.LightningModule):
    """A mean over all rows, and one over the few rows with a mark, which counts from the second step on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 1).double()

    def rare(self, errors, marks):
        return torch.nan_to_num((errors * marks).sum() / marks.sum())

    def training_step(self, batch, batch_idx):
        rows, marks = batch
        errors = (self.layer(rows)[:, 0] - rows[:, 0]).square()
        return min(1.0, 0.1 * self.global_step) * self.rare(errors, marks) + 2 * errors.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Chosen(Rare):
    def rare(self, errors, marks):
        return torch.where(marks.sum() > 0, (errors * marks).sum() / marks.sum(), 0.0)


class Kept(Rare):
    """Means that are not numbers are left out of a sum."""

    def rare(self, errors, marks):
        means = torch.stack([(errors * marks).sum() / marks.sum(), errors.sum() * 0])
        return means[~means.isnan()].sum()


class MeanOfSome(torch.autograd.Function):
    """A mean that is 0 for no rows, in a function of the user's own."""

    @staticmethod
    def forward(ctx, errors, marks):
        ctx.save_for_backward(marks)
        return ((errors * marks).sum() / marks.sum()).nan_to_num()

    @staticmethod
    def backward(ctx, gradient):
        (marks,) = ctx.saved_tensors
        return gradient * marks / marks.sum(), None


class Custom(Rare):
    def rare(self, errors, marks):
        return MeanOfSome.apply(errors, marks)


class Broken(Rare):
    """The gradient of the whole batch is not finite either."""

    def rare(self, errors, marks):
        return torch.nan_to_num((errors * 0 * marks).sum() / (0 * marks.sum()))


def weights_after(module, strategy):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4 * ROWS, 6, generator=generator, dtype=torch.float64)
    marks = (torch.arange(4 * ROWS) % 3 == 0).double()
    L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **strategy,
    ).fit(module, DataLoader(list(zip(rows, marks, strict=True)), batch_size=ROWS))  # fmt: skip
    return module.layer.weight.detach()


EACH_ONCE = [(Rare, 1), (Chosen, 2), (Kept, 1), (Custom, 2)]


@pytest.mark.parametrize(("kind", "micro_batch_size"), crossed([Rare, Chosen, Kept, Custom], [1, 2], fast=EACH_ONCE))
def test_a_mean_of_no_rows_does_not_spoil_gradients(kind, micro_batch_size):
    split = weights_after(kind(), {"strategy": UnifiedStrategy(micro_batch_size=micro_batch_size)})
    torch.testing.assert_close(split, weights_after(kind(), {}), rtol=1e-9, atol=1e-12)


def test_a_gradient_that_is_not_finite_for_the_whole_batch_stays():
    split = weights_after(Broken(), {"strategy": UnifiedStrategy(micro_batch_size=1)})
    torch.testing.assert_close(split, weights_after(Broken(), {}), equal_nan=True)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_one_entry_that_is_not_finite_is_seen(spoilt):
    sparse = torch.sparse_coo_tensor([[2]], [[1.0, 2.0]], (5, 2), check_invariants=True)
    gradients = [None, torch.ones(3), sparse, torch.zeros(0), torch.ones(2, dtype=torch.bfloat16)]

    assert are_finite(gradients)
    assert not are_finite([*gradients, torch.tensor([0.0, spoilt])])
    assert not are_finite([*gradients, sparse * spoilt])
