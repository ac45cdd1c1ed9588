"""Metrics of the progress bar equal those of plain Lightning, and are copied when read."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows


class Logging(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch["x"]).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch["x"]).mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Reader(L.Callback):
    def __init__(self):
        self.read = []

    def note(self, trainer, *_):
        self.read.append(copy.deepcopy(trainer.progress_bar_metrics))

    on_train_epoch_end = on_validation_start = on_validation_end = on_fit_end = note

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.note(trainer)


def fitted(strategy, *callbacks, **options):
    torch.manual_seed(0)
    loader = DataLoader(Rows([{"x": torch.randn(2)} for _ in range(12)]), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        **{"max_epochs": 2, **options},
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Logging(), loader, loader)
    return trainer


def test_a_reader_sees_the_numbers_of_plain_lightning_at_every_hook():
    ours, plain = Reader(), Reader()
    end, plain_end = (fitted(strategy, reader) for strategy, reader in (("unified", ours), ("auto", plain)))

    assert len(ours.read) > 8
    assert ours.read == plain.read
    assert end.progress_bar_metrics == plain_end.progress_bar_metrics
    assert all(isinstance(value, float) for metrics in ours.read for value in metrics.values())


@pytest.mark.parametrize(("strategy", "copies"), [("unified", 0), ("auto", 6)])
def test_no_training_metric_is_copied_unless_someone_reads_it(monkeypatch, strategy, copies):
    copied, convert, counts = [], result.convert_tensors_to_scalars, []
    monkeypatch.setattr(result, "convert_tensors_to_scalars", lambda value: copied.append(1) or convert(value))

    class Counted(L.Callback):
        def on_train_epoch_start(self, *_):
            copied.clear()

        def on_train_epoch_end(self, *_):
            counts.append(len(copied))

    fitted(strategy, Counted(), limit_val_batches=0, max_epochs=1)

    assert counts == [copies]
