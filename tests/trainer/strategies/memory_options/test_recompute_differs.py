"""Blocks whose second run differs: refused if checkpointing was asked for, else left out."""

import copy

import pytest
import torch

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import RecomputationError
from tests.support.lanes import first_cells
from tests.support.modules.recomputed import TEXT, Block, Deep, fit, trained
from tests.trainer.strategies.memory_options.test_recompute import assert_equal


class Scaled(Block):
    """Reads an attribute of its class, which changes before the backward pass."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x * Scaled.scale)


class Longer(Block):
    """Saves more tensors in its second run."""

    again = False

    def forward(self, x):
        return super().forward(x.sin() * x if Longer.again else x)


class Scaling(Deep):
    """Its memory runs out once in a batch without recomputation."""

    kind, batches_short = Scaled, 1

    def __init__(self):
        super().__init__(norm=False)
        self.layers = torch.nn.ModuleList([Block(), Block(), self.kind(), self.kind()])
        self.left = self.batches_short

    def configure_micro_batches(self, stage):
        return MicroBatchRules(splittable=False)

    def training_step(self, batch, batch_idx):
        if self.left and not self.recomputes and self.trainer.strategy.policy.recomputation.policy is None:
            raise RuntimeError(TEXT)
        self.left = 0
        Scaled.scale, Longer.again = 2.0, False
        try:
            return super().training_step(batch, batch_idx)
        finally:
            Scaled.scale, Longer.again = 1.0, True


class Plain(Scaling):
    batches_short = 0


class Lengthening(Scaling):
    kind = Longer


class PlainLengthening(Lengthening):
    batches_short = 0


def test_recompute_true_refuses_it_before_weights_are_written():
    module = Plain()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RecomputationError, match=r"Scaled computed other values .*recompute=False"):
        fit(module, UnifiedStrategy(recompute=True))

    assert torch.equal(before["head.weight"], module.head.weight)


@first_cells(1, ("plain", "short"), [(Plain, Scaling), (PlainLengthening, Lengthening)])
def test_turned_on_automatically_it_leaves_these_blocks_out_and_repeats_the_step(plain, short, caplog):
    _, expected, _ = trained(plain, recompute=False)
    module, found, trainer = trained(short, recompute="auto")

    assert_equal(expected, found)
    name = short.kind.__name__
    events = [event for event in trainer.strategy.events if "is not recomputed from here on" in event]
    assert len(events) == 1 and events[0].startswith(f"{name} is not recomputed")
    assert sum("it leaves out all" in record.getMessage() for record in caplog.records) == 1
    assert trainer.strategy.recoveries == 1
    assert [layer.runs for layer in module.layers] == [6, 6, 3, 3]
