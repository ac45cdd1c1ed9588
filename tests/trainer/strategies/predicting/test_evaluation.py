"""Validation steps and prepared batches are part of the plan."""

import pytest
import torch

from lightning_unified import MicroBatchRules, predict
from lightning_unified.errors import OutOfMemoryError
from lightning_unified.strategies import UnifiedStrategy
from tests.support.lanes import some
from tests.trainer.strategies.predicting.deep import MIB, Batches, Validates, fit

PAIR = 2 * 32 * 128 * 64 * 4  # bytes of 32 rows and their noise


class Prepares(Validates):
    """Pairs each batch with noise; a pair cannot be prepared again."""

    def configure_micro_batches(self, stage):
        return MicroBatchRules(prepare=lambda batch: (batch, torch.randn_like(batch)))

    def training_step(self, batch, batch_idx):
        rows, noise = batch
        return super().training_step(rows + noise, batch_idx)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The strategy of a fit with validation that prepares its batches.

    Prepared batches are of another type than the loader's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path_factory.mktemp("cache")))
        strategy = UnifiedStrategy(simulate="h200", budget="24MiB")
        fit(strategy, kind=Prepares, validation_rows=8)
        return strategy


def test_a_prepared_batch_is_not_prepared_again_in_its_dry_run(prepared):
    assert prepared.plan.prediction is not None, prepared.plan.reasons
    assert not [event for event in prepared.events if "could not be traced" in event]
    assert prepared.recoveries == 0


def test_a_validation_step_is_traced_before_and_after_batches_are_prepared(prepared):
    assert prepared.plan.prediction.validation.rows == 8


def test_what_prepare_adds_to_a_batch_is_counted_once(prepared):
    assert prepared.plan.prediction.categories["batch"] == PAIR


def test_a_batch_of_the_loader_is_prepared_in_its_dry_run():
    found = predict(Prepares(), Batches(32, [128])[0], device="cuda")

    assert found.categories["batch"] == PAIR


@pytest.mark.parametrize(("sanity_steps", "event"), some([(1, 0), (0, 1)], (0, 1)))
def test_a_validation_batch_that_does_not_fit_is_split_before_memory_runs_out(sanity_steps, event):
    strategy = UnifiedStrategy(simulate="h200", budget="48MiB")
    module = fit(strategy, kind=Validates, rows=16, validation_rows=256, num_sanity_val_steps=sanity_steps)
    validation = strategy.plan.prediction.validation

    assert strategy.recoveries == 0
    assert strategy.events[event].startswith("validation planned: 2 micro-batches of up to 128 rows: ")
    assert (validation.rows, validation.num_micro_batches) == (128, 2)
    assert validation.reserved_bytes <= 48 * MIB
    assert strategy.plan.reasons["validation"].startswith("2 micro-batches of up to 128 rows")
    whole = fit("auto", kind=Validates, rows=16, validation_rows=256).trainer.callback_metrics["loss"]
    assert torch.allclose(module.trainer.callback_metrics["loss"], whole)


@pytest.mark.slow
def test_the_predicted_peak_is_that_of_a_validation_that_takes_more_than_training():
    strategy = UnifiedStrategy(simulate="h200", budget="100MiB")
    fit(strategy, kind=Validates, rows=16, validation_rows=256, num_sanity_val_steps=0)

    assert strategy.plan.prediction.validation.rows == 256
    train_batch = 16 * 128 * 64 * 4  # one may be there still
    assert strategy.plan.predicted_peak_bytes == pytest.approx(strategy.measured_peak().bytes, abs=1.01 * train_batch)


def test_a_validation_that_never_fits_is_named_and_the_run_continues(caplog):
    class Whole(Validates):
        def configure_micro_batches(self, stage):
            return MicroBatchRules(splittable=False)

    strategy = UnifiedStrategy(simulate="h200", budget="40MiB")
    with caplog.at_level("WARNING", logger="lightning_unified"), pytest.raises(OutOfMemoryError, match="validation"):
        fit(strategy, kind=Whole, rows=16, validation_rows=256, num_sanity_val_steps=0)

    assert strategy.plan.reasons["validation"].startswith("does not fit: the whole batch of 256 rows at once needs ")
    assert "The validation step is predicted not to fit." in caplog.text


def test_a_validation_step_that_cannot_be_traced_is_said_and_runs():
    class Odd(Validates):
        def validation_step(self, batch, batch_idx):
            raise_if = batch.sum().item() > 1e9
            if not raise_if and isinstance(batch, torch._subclasses.FakeTensor):
                raise TypeError("no fakes")

    strategy = UnifiedStrategy(simulate="h200", budget="48MiB")
    fit(strategy, kind=Odd, rows=16, validation_rows=16)

    assert strategy.plan.prediction.validation is None
    assert "no fakes" in strategy.plan.reasons["validation"]
