"""A larger share of activations in the last compiled blocks fills the room that a plan leaves."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn

import lightning_unified as unified
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import Compilation
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.larger_shares import (
    Larger,
    Measured,
    in_last_blocks,
    larger_shares,
    most_gained,
)
from tests.support.modules.decoders import WIDTH, Block

BLOCKS = 6
OWN = Measured(bytes=1000, seconds=10.0)


def keeping(share, **last):
    policy = RecomputePolicy(blocks="all", kept=share, of=BLOCKS, **last)
    return Combination(precision="32-true", recompute=policy)


NONE = Combination(precision="32-true", recompute=RecomputePolicy(blocks=0))


def gained(*steps, room):
    larger = [(share, Measured(bytes=count, seconds=seconds)) for share, count, seconds in steps]
    return most_gained(OWN, larger, blocks=BLOCKS, room=room)


def test_a_larger_share_holds_in_as_many_blocks_as_there_is_room_for():
    assert gained((0.5, 1600, 8.0), room=1350) == Larger(share=0.5, blocks=3)
    assert gained((0.5, 1600, 8.0), room=1099) is None
    assert gained((0.5, 1600, 8.0), room=9999) == Larger(share=0.5, blocks=BLOCKS - 1)


def test_the_share_that_saves_most_time_is_chosen():
    assert gained((0.2, 1300, 9.5), (0.5, 1600, 8.0), room=1350) == Larger(share=0.5, blocks=3)
    assert gained((0.2, 1300, 9.0), (0.5, 1600, 9.0), room=1250) == Larger(share=0.2, blocks=5)
    assert gained((0.2, 1000, 10.0), (0.3, 1000, 10.0), (0.5, 1600, 8.0), room=1350) == Larger(share=0.5, blocks=3)


def test_a_share_that_saves_little_time_is_left_out():
    assert gained((0.5, 1600, 9.95), room=1350) is None


def test_shares_that_may_run_are_tried_from_small_to_large():
    compared = [NONE, *map(keeping, (0.5, 0.2, 0.3, 0.0))]
    assert larger_shares(keeping(0.2), compared) == [(0.3, keeping(0.3)), (0.5, keeping(0.5)), (1.0, NONE)]
    assert larger_shares(keeping(0.2), [keeping(0.2)]) == []
    assert larger_shares(keeping(0.2, last=2, kept_last=0.5), compared) == []
    assert larger_shares(NONE, compared) == []


def test_fewer_blocks_are_tried_where_the_wanted_number_may_not_fit():
    tried = in_last_blocks(keeping(0.2), Larger(share=0.5, blocks=3))
    assert tried == [keeping(0.2, last=3, kept_last=0.5), keeping(0.2, last=2, kept_last=0.5)]
    assert in_last_blocks(keeping(0.2), Larger(share=0.5, blocks=1)) == [keeping(0.2, last=1, kept_last=0.5)]
    assert str(tried[0].recompute) == "all blocks, 20 % kept, 50 % in the last 3"
    assert keeping(0.5).again < tried[0].again < tried[1].again < keeping(0.2).again


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
def test_a_plan_fills_the_budget_with_activations_of_the_last_blocks():
    module, batch, compilation = Net(), torch.randn(64, 512, WIDTH), Compilation("blocks")
    compilation.begin(module)
    h200 = tabled_rates("NVIDIA H200")
    assert h200 is not None
    rates = replace(h200, launch=0.0)  # the host waits for no launch, as for large kernels

    def predicted(share, **last):
        policy = RecomputePolicy(blocks="all", kept=share, of=BLOCKS, **last)
        return unified.predict(module, batch, device="cuda", recompute=policy, rates=rates)

    less, more = predicted(0.0), predicted(0.5)
    budget = (less.reserved_bytes + more.reserved_bytes) // 2
    found = unified.plan(module, batch, device="cuda", budget=budget, rates=rates)
    compilation.end()

    assert found.recomputed is not None and "% in the last" in found.recomputed
    assert found.prediction is not None
    assert less.peak_bytes < found.prediction.peak_bytes < more.peak_bytes
    assert found.prediction.reserved_bytes <= budget
