"""A batch whose loss is computed in another way than before is checked before its update."""

import pytest
import torch
from torch.nn import functional as F

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.graph import graph_fact
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run

WEIGHTS = [0.0] * 9 + [1.0] * 91


def compared(out):
    return torch.cdist(out, out).mean()


class ByAList(Net):
    """Its term is switched on by an entry of a list."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        loss = self.loss(out, batch)
        return loss + compared(out) if WEIGHTS[batch_idx] else loss


class ByProgress(Net):
    """Its term is switched on by a counter of the Trainer's loop."""

    def loss(self, out, batch):
        seen = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return super().loss(out, batch) + (compared(out) if seen == 10 else 0.0)


class Alternates(Net):
    """Computes an equal loss in two ways."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch["x"])
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready % 2:
            return F.cross_entropy(out, batch["y"])
        return F.nll_loss(out.log_softmax(-1), batch["y"])


@first_cells(1, "kind", [ByAList, ByProgress])
def test_a_term_that_is_switched_on_unseen_is_refused_before_its_update(kind, checks):
    with pytest.raises(SplitError, match=f"{kind.__name__} cannot be split exactly"):
        run(kind, batches(number=13))

    assert checks.steps[-1] == 9


def test_a_graph_that_was_checked_asks_for_no_other_check(checks):
    run(Alternates, batches(number=40))

    assert checks.steps == [0, 1, 3, 7, 15, 31]


def test_a_graph_is_the_same_for_other_sizes_and_values():
    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(50)])
    losses = [net(torch.randn(rows, 4)).square().mean() for rows in (2, 7)]

    assert graph_fact(losses[0]) == graph_fact(losses[1])
    assert graph_fact(losses[0]) != graph_fact(losses[0] + net[0].weight.sum())
