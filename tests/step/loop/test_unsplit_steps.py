"""Steps that cannot be split run as under plain Lightning, and the strategy says so once."""

import logging

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError
from tests.support.lanes import first_cells
from tests.support.modules.hooks import Small, TwoByHand
from tests.support.modules.plain import fit, weights


class Draws(Small):
    """Draws its own batches, for training and validation."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch["x"]), on_step=True, on_epoch=True)
        return {"loss": loss, "rows": len(batch["x"]), "index": batch_idx}

    def validation_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        self.log("validation", self.loss(batch), batch_size=len(batch["x"]))

    def val_dataloader(self):
        return self.loader()


class RunsOut(Draws):
    def training_step(self, dataloader_iter):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def trained(kind, strategy="auto", **options):
    torch.manual_seed(0)
    module = kind().double()
    seen, trainer = fit(module, kind.loader(), strategy=strategy, **options)
    return module, seen, trainer


def assert_same(kind, strategy, **options):
    plain, plain_saw, _ = trained(kind, **options)
    ours, our_saw, trainer = trained(kind, strategy, **options)

    torch.testing.assert_close(weights(ours), weights(plain), rtol=0, atol=0)
    torch.testing.assert_close(our_saw.outputs, plain_saw.outputs, rtol=0, atol=0)
    assert our_saw.callback_metrics == plain_saw.callback_metrics
    return trainer.strategy.events


@first_cells(1, "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
@pytest.mark.parametrize("size", ["auto", 3])
def test_a_step_that_draws_its_batches_trains_as_under_plain_lightning(caplog, size, options):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        events = assert_same(Draws, UnifiedStrategy(micro_batch_size=size), **options)

    said = [text for text in events if "draws its own batches" in text]
    assert [text.split("(")[0] for text in said] == ["validation_step", "training_step"]
    assert [record.message.split(":")[0] for record in caplog.records] == (
        [] if size == "auto" else ["micro_batch_size=3 has no effect"]
    )


def test_a_size_for_evaluations_that_draw_their_batches_is_named(caplog):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        trained(Draws, UnifiedStrategy(evaluation_micro_batch_size=2))

    assert [record.message.split(":")[0] for record in caplog.records] == [
        "evaluation_micro_batch_size=2 has no effect"
    ]


def test_a_step_that_draws_its_batches_is_not_repeated():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trained(RunsOut, UnifiedStrategy(micro_batch_size=3))


def test_terms_of_batches_that_a_step_draws_are_refused():
    with pytest.raises(ConfigurationError, match='window_mean="batches"'):
        trained(Draws, UnifiedStrategy(window_mean="terms"), accumulate_grad_batches=2)


@pytest.mark.parametrize("size", ["auto", 3])
def test_manual_optimization_is_said_once_not_to_be_split(caplog, size):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        events = assert_same(TwoByHand, UnifiedStrategy(micro_batch_size=size))

    assert len([text for text in events if "automatic_optimization=False" in text]) == 1
    assert len(caplog.records) == (0 if size == "auto" else 1)
