"""An evaluation that draws random numbers emits an event that names its logs.

An evaluation without draws emits none.
"""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import SplitError
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


class Layered(Deterministic):
    """Has a layer that draws in train mode only."""

    make_layer = staticmethod(lambda: nn.Dropout(0.5))

    def __init__(self):
        super().__init__()
        self.layer = self.make_layer()

    def loss(self, batch):
        return self.predict_step(batch, 0).square().mean()

    def predict_step(self, batch, batch_idx):
        out = self.layer(self.prepared(batch["x"])[:, None])
        return self.net((out[0] if isinstance(out, tuple) else out)[:, 0])

    def prepared(self, x):
        return x


LAYERS = {
    "dropout": lambda: nn.Dropout(0.5),
    "feature dropout": lambda: nn.Dropout1d(0.5),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "rrelu": nn.RReLU,
    "LSTM": lambda: nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True),
    "GRU": lambda: nn.GRU(6, 6, batch_first=True),
}


@first_cells(2, "layer", LAYERS)
@pytest.mark.parametrize("method", ["validate", "predict"])
def test_layers_that_draw_in_train_mode_only_are_no_draws(method, layer):
    assert events(type("Layering", (Layered,), {"make_layer": staticmethod(LAYERS[layer])}), method) == []


class Centred(Layered):
    """Mixes its rows in front of the layer."""

    def prepared(self, x):
        return x - x.mean(0)


@first_cells(2, "layer", LAYERS)
def test_predictions_that_mix_rows_in_front_of_such_a_layer_are_refused(layer):
    with pytest.raises(SplitError, match="is not known to be one entry for each row"):
        events(type("Layering", (Centred,), {"make_layer": staticmethod(LAYERS[layer])}), "predict")
