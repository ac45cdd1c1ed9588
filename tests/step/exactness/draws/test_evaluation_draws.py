"""An evaluation that draws random numbers emits an event that names its logs.

An evaluation without draws emits none.
"""

import lightning as L
import torch

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells
from tests.support.modules.drawn_kinds import Variational
from tests.support.modules.step_kinds import Kind


class Evaluated(Variational):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return torch.bernoulli(self.net[0](batch["x"]).sigmoid())


class Deterministic(Kind):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch["x"])


def events(kind, method: str) -> list[str]:
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(evaluation_micro_batch_size=3),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    getattr(trainer, method)(kind(), Kind.loader())
    return [event for event in trainer.strategy.events if "random draws" in event]


@first_cells(1, "method", ["validate", "test"])
def test_logs_that_draws_change_are_named_once(method):
    (event,) = events(Evaluated, method)

    assert "are made for each micro-batch" in event
    assert "logs ('val_loss')" in event


def test_predictions_that_draws_change_are_said():
    (event,) = events(Evaluated, "predict")

    assert event.startswith("random draws of predict_step are made for each micro-batch")


@first_cells(1, "method", ["validate", "test", "predict"])
def test_nothing_is_said_where_nothing_is_drawn(method):
    assert events(Deterministic, method) == []
