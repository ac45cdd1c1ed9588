"""A fit with a replayed network equals the fit without. Python replays.

Tests cover micro-batches, windows of batches, and memory that runs out.
"""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.nn.cuda_graphs.recording import Recording
from lightning_unified.nn.cuda_graphs.shapes import SETTLED
from tests.support.lanes import crossed, first_cells
from tests.support.lasting import Lasting

pytestmark = pytest.mark.usefixtures("graphs_by_python")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.outside = nn.Parameter(torch.ones(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return mse_loss(self.network(x) * self.outside, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Records(L.Callback):
    """Has the network's calls recorded, as `CudaGraphs` does on CUDA."""

    def on_train_start(self, trainer, pl_module):
        self.calls = RecordedCalls(pl_module.network)

    def on_train_end(self, trainer, pl_module):
        self.calls.remove()


class RunsOut(L.Callback):
    """Has memory run out once in a late step, after its first part."""

    done = Lasting(False)

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 14 and not self.done:
            self.done = True
            raise torch.OutOfMemoryError("CUDA out of memory")


def fit(module, *callbacks, rows, window):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(96, width, generator=generator, dtype=torch.float64) for width in (6, 2)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        strategy=UnifiedStrategy(micro_batch_size=rows),
        accumulate_grad_batches=window,
        gradient_clip_val=0.5,
        max_steps=20,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module.double(), DataLoader(data, batch_size=8))
    return trainer


@first_cells(
    1,
    ("rows", "window", "short"),
    crossed(
        ["auto", 4, 3],
        [1, 3],
        [False, True],
        fast=[("auto", 1, False), (3, 3, True)],
    ),
)
def test_weights_are_those_of_a_fit_without(rows, window, short, monkeypatch):
    ours = Module()
    plain = copy.deepcopy(ours)
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda *args, **kwargs: (replays.append(1), replay(*args, **kwargs))[1])
    trainer = fit(ours, Records(), *([RunsOut()] if short else []), rows=rows, window=window)
    fit(plain, rows=rows, window=window)

    assert len(replays) > SETTLED
    assert bool(trainer.strategy.policy.recoveries) is short
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)
