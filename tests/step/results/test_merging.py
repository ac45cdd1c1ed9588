"""Merge the values of micro-batches by a rule."""

import pytest
import torch

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights, fitting, merged

WEIGHTS = MicroBatchWeights([2, 1], [2.0, 1.0])
SIZES = MicroBatchWeights([5, 5, 5, 1], [5.0, 5.0, 5.0, 1.0])


@pytest.mark.parametrize("rule", ["concatenate 0", "mean", "max"])
def test_memory_that_runs_out_in_a_merge_is_no_refusal(rule, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GiB)")

    values = [torch.zeros(3), torch.ones(3)]
    for owner, name in ((torch, "cat"), (torch, "stack"), (torch.Tensor, "__mul__")):
        monkeypatch.setattr(owner, name, fails)

    with pytest.raises(RuntimeError, match="out of memory"):
        merged(rule, values, WEIGHTS)


def test_values_of_other_shapes_are_refused():
    with pytest.raises(SplitError, match="cannot be put together by 'max'"):
        merged("max", [torch.zeros(3), torch.zeros(2)], WEIGHTS)


KINDS = {"tensor": lambda mean: mean, "number": torch.Tensor.item, "array": torch.Tensor.numpy}


@pytest.mark.parametrize("of", KINDS.values(), ids=KINDS)
def test_a_mean_of_a_vanished_float32_loss_merges_as_a_mean(of):
    # below 1e-38 float32 numbers are multiples of 1.4e-45
    terms = 1e-43 * torch.rand(16, generator=torch.Generator().manual_seed(1))
    whole, parts = of(terms.mean()), [of(part.mean()) for part in terms.split(5)]

    assert "mean" in fitting(parts, whole, SIZES, tolerance=1e-4)


def test_the_loss_is_not_taken_for_one_of_its_summands():
    """A mean of a summand fits the loss within the rounding of gradients where the other summands are alike."""
    values, whole = [torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(1.5)
    factors = [[0.5, 0.5], [0.50004, 0.49996]]
    weights = MicroBatchWeights([1, 1], [1.0, 1.0], summands=factors, losses=[1.0, 2.0], loss=1.5)
    table = MergeTable()
    table.learn("loss", values, whole, weights, tolerance=1e-4)

    assert "mean of summand 1" in table.all_rules("loss")
    assert table.decides("loss", values, weights)
    assert merged(table.rule("loss"), values, weights) == whole
