"""Evaluation batches whose step first decides otherwise are compared before their results are merged."""

import lightning as L
import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.split import Net
from tests.support.runs.schedules import batches


def trainer(strategy):
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(accelerator="cpu", strategy=strategy, **off)


class Predicts(Net):
    """Predicts row by row, except in batch 9."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def predict_step(self, batch, batch_idx):
        self.seen += 1
        return self.out(self.net(batch["x"]), batch["x"], batch_idx)


class ByFigure(Predicts):
    def out(self, out, x, batch_idx):
        return out - out.mean(0) if x.mean() > 1 else out


class ByFactor(Predicts):
    def out(self, out, x, batch_idx):
        return out * min(1.0, 1 / abs(float(x.mean())))


class ByIndex(Predicts):
    def out(self, out, x, batch_idx):
        return out - out.mean(0) if batch_idx == 9 else out


class ByCounter(Predicts):
    def out(self, out, x, batch_idx):
        return out - out.mean(0) if self.seen == 10 else out


def loader(shift):
    """Return a loader of 12 batches; the rows of batch 9 are moved."""
    data = batches(number=12, size=8)
    for row in data.dataset.rows[72:80]:
        row["x"] = row["x"] + shift
    return data


@first_cells(2, "kind", [ByFigure, ByCounter, ByFactor, ByIndex])
def test_predictions_that_first_depend_on_other_rows_are_refused(kind):
    with pytest.raises(SplitError, match="is not known to be one entry for each row"):
        trainer(UnifiedStrategy(evaluation_micro_batch_size=3)).predict(kind().double(), loader(2.0))


def test_predictions_that_decide_alike_are_those_of_whole_batches():
    results = []
    for strategy in ("auto", UnifiedStrategy(evaluation_micro_batch_size=3)):
        torch.manual_seed(0)
        results.append(trainer(strategy).predict(ByFigure().double(), loader(0.0)))

    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


class LogsOf(Net):
    """Logs a mean, and in batch 9 its square."""

    def validation_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch["x"]), batch)
        self.log("figure", loss if batch["x"].mean().item() < 1 else loss**2)


def test_a_log_that_first_bends_in_an_evaluation_is_named(caplog):
    trainer(UnifiedStrategy(evaluation_micro_batch_size=3)).validate(LogsOf().double(), loader(2.0), verbose=False)

    assert any("'figure'" in record.message for record in caplog.records)
