"""Runs with recorded modules train like runs without.

Batches are split or whole, and memory may run out.
"""

import copy
import gc

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import CudaGraphs, UnifiedStrategy
from lightning_unified.nn.cuda_graphs.shapes import SETTLED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = SETTLED + 6


class Module(L.LightningModule):
    def __init__(self, *, width=32, depth=2, lr=1e-3):
        super().__init__()
        self.lr = lr
        layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.GELU())]
        self.network = nn.Sequential(nn.Embedding(100, width), *layers, nn.Linear(width, 100))
        self.losses = []

    def training_step(self, batch):
        loss = cross_entropy(self.network(batch[0]).float().flatten(0, 1), batch[0].flatten())
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch):
        self.log("val", self.network(batch[0]).float().square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)


class Count(L.Callback):
    """Remembers how many shapes of each part were recorded after each batch."""

    def __init__(self, graphs):
        self.graphs, self.seen = graphs, []

    def on_train_batch_end(self, *_):
        self.seen.append(dict(self.graphs.recorded))


@pytest.fixture(autouse=True)
def _memory_is_given_back():
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def fit(module, *callbacks, strategy, rows=8, length=16, precision="32-true", validates=False, steps=STEPS):
    ids = torch.randint(100, (steps * rows, length), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(ids), batch_size=rows)
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=5 if validates else None,
        limit_val_batches=2 if validates else 0,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader if validates else None)
    return torch.stack(module.losses).cpu()


@pytest.mark.parametrize(
    ("cut", "precision", "validates"),
    [("auto", "32-true", False), (2, "32-true", True), ("auto", "bf16-mixed", True), (3, "bf16-mixed", False)],
)
def test_a_run_trains_as_without_graphs(cut, precision, validates):
    ours, graphs = Module(), CudaGraphs()
    plain, count = copy.deepcopy(ours), Count(graphs)
    settings = {"precision": precision, "validates": validates}
    losses = fit(ours, graphs, count, strategy=UnifiedStrategy(micro_batch_size=cut), **settings)
    expected = fit(plain, strategy=UnifiedStrategy(micro_batch_size=cut), **settings)

    assert max(each["network"] for each in count.seen) >= 1
    torch.testing.assert_close(losses, expected, rtol=2e-2 if precision == "bf16-mixed" else 1e-4, atol=1e-4)
    assert ours.network._compiled_call_impl is None


def test_it_works_under_lightnings_own_strategy_too():
    ours, graphs = Module(), CudaGraphs(of="network")
    plain, count = copy.deepcopy(ours), Count(graphs)
    losses = fit(ours, graphs, count, strategy="auto")

    assert count.seen[-1] == {"network": 1}
    torch.testing.assert_close(losses, fit(plain, strategy="auto"), rtol=1e-4, atol=1e-4)


class Shortage(L.Callback):
    """Has the network recorded again in a late step, in three quarters of the memory."""

    def __init__(self, graphs):
        self.graphs = graphs

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.cuda.set_per_process_memory_fraction(1.0)
        if batch_idx == SETTLED:
            with_recording = torch.cuda.memory_reserved()
            self.graphs._parts["network"].release()
            gc.collect()
            torch.cuda.empty_cache()
            left = torch.cuda.memory_reserved()
            left += (with_recording - left) * 3 // 4
            torch.cuda.set_per_process_memory_fraction(left / torch.cuda.get_device_properties(0).total_memory)


def test_a_recording_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches():
    ours, graphs = Module(width=256, depth=6), CudaGraphs()
    plain, count, strategy = copy.deepcopy(ours), Count(graphs), UnifiedStrategy(budget="8GiB", recompute=False)
    size = {"rows": 64, "length": 256, "steps": 2 * SETTLED + 4}
    losses = fit(ours, graphs, count, Shortage(graphs), strategy=strategy, **size)
    expected = fit(plain, strategy=UnifiedStrategy(budget="8GiB", recompute=False), **size)

    assert strategy.policy.recoveries
    assert strategy.policy.sizing.micro_batch_size < 64
    assert count.seen[-1]["network"] >= 1
    assert len(expected) == 2 * SETTLED + 4
    ends = (losses[-1], expected[-1])  # parts of a cut batch have losses of their own
    torch.testing.assert_close(*ends, rtol=5e-2, atol=5e-2)
