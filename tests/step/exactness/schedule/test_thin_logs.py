"""A log that a sum fits as long as a single micro-batch has any is checked again."""

import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_recall, multiclass_stat_scores

from lightning_unified import UnifiedStrategy
from tests.support.modules.plain import Recorder
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches, run

RARE = 4


class Recalls(Net):
    """Logs the recall of a rare class by predictions that are not trained."""

    def training_step(self, batch, batch_idx):
        self.log("rare", self.figure(batch["x"][:, : RARE + 1], batch["y"]))
        return F.cross_entropy(self.net(batch["x"]), batch["y"] % RARE)

    @staticmethod
    def figure(scores, labels):
        return multiclass_recall(scores, labels, RARE + 1, average=None)[RARE].double()


class Counts(Recalls):
    @staticmethod
    def figure(scores, labels):
        return multiclass_stat_scores(scores, labels, RARE + 1, average=None)[RARE, 0].double()


def rows(number, *, twice):
    """Return batches with a row of the rare class that is found.

    From batch `twice` on they have another, which is not.
    """
    generator = torch.Generator().manual_seed(0)

    def row(batch, place):
        is_missed = batch >= twice and place == 7
        x = torch.rand(6, dtype=torch.float64, generator=generator) + 1
        x[RARE if place == 2 else 0] += 1
        return {"x": x, "y": RARE if place == 2 or is_missed else place % RARE}

    return batches(number=number, size=9, change=row)


def trained(kind, loader):
    strategy, recorder = UnifiedStrategy(micro_batch_size=3), Recorder()
    run(kind, loader, strategy=strategy, callbacks=[recorder])
    return [metrics["rare"] for metrics in recorder.callback_metrics], strategy.policy.splits.verdict.unmergeable


def test_the_recall_of_a_rare_class_is_named_before_it_differs(checks):
    _, unmergeable = trained(Recalls, rows(7, twice=5))

    assert "rare" in str(unmergeable)
    assert checks.steps[-1] == 5


def test_a_rare_count_is_logged_without_a_warning(checks):
    logged, unmergeable = trained(Counts, rows(30, twice=99))

    assert not unmergeable
    assert logged == [1.0] * 30
    assert len(checks.steps) < 25
