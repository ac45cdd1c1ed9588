"""Merge the values of micro-batches by a rule."""

import pytest
import torch

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MicroBatchWeights, merged

WEIGHTS = MicroBatchWeights([2, 1], [2.0, 1.0])


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
