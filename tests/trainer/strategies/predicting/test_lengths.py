"""Batches of other row lengths get plans of their own."""

import pytest
import torch

from lightning_unified.strategies import UnifiedStrategy
from tests.support.lasting import Lasting
from tests.trainer.strategies.predicting.deep import MIB, Deep, fit, weights


@pytest.mark.slow
def test_longer_rows_are_planned_for_when_they_come():
    strategy = UnifiedStrategy(simulate="h200", budget="16MiB", recompute=False)
    fit(strategy, lengths=(32, 128, 64, 128))

    assert strategy.recoveries == 0
    assert [event.split(" in ")[0] for event in strategy.events].count("planned") == 2


class Noting(Deep):
    """Notes the shape of every micro-batch."""

    seen = Lasting(())

    def training_step(self, batch, batch_idx):
        if type(batch) is torch.Tensor and not batch.is_meta:
            self.seen += (tuple(batch.shape[:2]),)
        return super().training_step(batch, batch_idx)


LENGTHS = (128, 96, 32, 96)


@pytest.fixture(scope="module")
def shorter(tmp_path_factory):
    """A run whose longest rows come first and do not fit at once, and what it was run with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path_factory.mktemp("cache")))
        # without the exactness check, which runs further rows
        strategy = UnifiedStrategy(simulate="h200", budget="6MiB", recompute=False, check_split=False)
        return fit(strategy, kind=Noting, lengths=LENGTHS), strategy


@pytest.mark.slow
def test_shorter_rows_get_the_largest_micro_batch_predicted_to_fit(shorter):
    module, _ = shorter
    at_once = {length: max(rows for rows, each in module.seen if each == length) for length in LENGTHS}

    assert at_once[128] < at_once[96] < at_once[32]


@pytest.mark.slow
def test_memory_does_not_run_out_in_shorter_rows_either(shorter):
    _, strategy = shorter

    assert strategy.recoveries == 0
    assert strategy.simulated.allocator.peak_reserved <= 6 * MIB


def test_micro_batches_sized_by_row_length_train_the_same_weights(shorter):
    torch.testing.assert_close(
        weights(shorter[0]), weights(fit("auto", kind=Noting, lengths=LENGTHS)), rtol=1e-5, atol=1e-7
    )


@pytest.mark.slow
def test_longer_rows_are_planned_for_after_shorter_ones_were_split():
    strategy = UnifiedStrategy(simulate="h200", budget="6MiB", recompute=False)
    fit(strategy, lengths=(96, 128))

    assert strategy.recoveries == 0
    assert [event.split(" in ")[0] for event in strategy.events].count("planned") == 2


@pytest.mark.slow
def test_no_more_than_a_few_lengths_are_planned_for(monkeypatch):
    monkeypatch.setattr("lightning_unified.planner.first_batch.planning._SHORTER", 1)
    strategy = UnifiedStrategy(simulate="h200", budget="6MiB", recompute=False)
    fit(strategy, lengths=(128, 120, 116))

    assert sum("shorter rows planned" in event for event in strategy.events) == 1
