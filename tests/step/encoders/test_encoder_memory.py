"""Encoders in chunks take less memory, as a dry run predicts and a plan knows."""

import pytest
import torch
from torch import nn

from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.planner.predict import plan, predict
from tests.support.lanes import some
from tests.support.modules.contrastive import Contrastive
from tests.support.runs.live_bytes import live_peak, peak_of
from tests.support.zoo.dry_run import trace_step


class Deep(Contrastive):
    """Activations of 12 layers at 128 positions, and embeddings of 4 entries."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12))
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 32, 4))


def deep_batch(rows=64):
    return {"x": torch.randn(rows, 128, 32), "y": torch.randn(rows, 128, 32)}


@pytest.mark.slow
def test_memory_falls_with_the_chunk(tmp_path):
    peaks = {
        rows: live_peak(Deep, deep_batch(), num_micro_batches=64 // rows, rows=rows, folder=tmp_path)
        for rows in (64, 16, 4)
    }
    activations = 2 * 64 * 128 * 32 * 4 * 12
    assert peaks[64] > activations
    assert peaks[16] < 0.3 * peaks[64]
    assert peaks[4] < 0.6 * peaks[16]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", some([1, 3, 4, 8], 3))
def test_a_dry_run_predicts_the_peak_of_a_step_in_chunks(chunks, tmp_path):
    predicted = peak_of(
        trace_step(Deep(), deep_batch(), rows=-(-64 // chunks), num_micro_batches=chunks, later_rows=64 // chunks)
    )
    measured = live_peak(Deep, deep_batch(), num_micro_batches=chunks, rows=-(-64 // chunks), folder=tmp_path)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_a_prediction_of_many_chunks_runs_two_of_them():
    every = peak_of(trace_step(Deep(), deep_batch(), rows=8, num_micro_batches=8))
    assert predict(Deep(), deep_batch(), device="cpu", micro_batch_size=8).peak_bytes == pytest.approx(every, rel=0.01)


@pytest.mark.slow
def test_a_plan_chooses_the_chunk_that_fits():
    class Quiet(Deep):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)[0]

    rates, budgets = tabled_rates("m2-16gb"), ("300MiB", "100MiB")
    plans = [
        plan(Quiet(), deep_batch(256), budget=budget, device="cuda", recompute=False, rates=rates) for budget in budgets
    ]
    assert plans[0].micro_batch_size == 256
    assert 1 < plans[1].micro_batch_size < 128
