"""A budget is not refused for BatchNorm that the step puts into eval mode before it runs it."""

import pytest
import torch
from torch import nn

from lightning_unified.errors import BudgetError
from lightning_unified.strategies import UnifiedStrategy
from tests.trainer.strategies.predicting.deep import Deep, fit, weights


class Normed(Deep):
    def __init__(self):
        super().__init__(depth=2)
        self.norm = nn.BatchNorm1d(64)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.norm(batch.transpose(1, 2)).transpose(1, 2), batch_idx)


class Frozen(Normed):
    def training_step(self, batch, batch_idx):
        self.norm.eval()
        return super().training_step(batch, batch_idx)


def small(**options):
    return UnifiedStrategy(simulate="h200", budget="8MiB", recompute=False, **options)


def test_layers_that_the_step_freezes_leave_it_to_be_split():
    strategy = small()
    module = fit(strategy, kind=Frozen, lengths=(128,))

    assert strategy.micro_batch_size < 32
    assert strategy.recoveries == 0
    assert int(module.norm.num_batches_tracked) == 0
    assert torch.allclose(weights(module), weights(fit("auto", kind=Frozen, lengths=(128,))), atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), [(Normed, {}), (Frozen, {"check_split": False})])
def test_layers_that_mix_or_may_mix_refuse_the_budget(kind, options):
    with pytest.raises(
        BudgetError, match=rf"The batch runs whole, because {kind.__name__} has BatchNorm in train mode"
    ):
        fit(small(**options), kind=kind)
