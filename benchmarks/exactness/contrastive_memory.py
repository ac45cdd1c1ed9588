"""Measure memory and time of contrastive steps on a CPU.

Steps run whole, and with encoders in chunks of rows.

    python -m benchmarks.exactness.contrastive_memory [--output benchmarks/exactness/contrastive_memory.json]

Takes about two minutes on one core. Each cell is one module at one chunk size:

- `peak_bytes`: the most bytes of tensors that are alive in the second step, by torch's profiler;
- `predicted_bytes`: the same from a dry run, without running the step;
- `seconds`: the median of three steps after a first one;
- `weights_off`: the largest difference between a weight after four steps and plain Lightning's, in float64.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.planner.predict import predict
from tests.support.runs.live_bytes import Loader, live_peak

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
STEPS = 4


class Contrastive(L.LightningModule):
    encoders = ("net",)

    def configure_micro_batches(self, stage):
        return MicroBatchRules(encoders=self.encoders)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def on_train_batch_start(self, batch, batch_idx):
        self.begun = time.perf_counter()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seconds = [*getattr(self, "seconds", []), time.perf_counter() - self.begun]


class SimCLR(Contrastive):
    """A convolutional network over two views of an image, and NT-Xent over all pairs."""

    rows = 128

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = (3, 32, 32, 64, 64)
        blocks = [
            nn.Sequential(
                nn.Conv2d(one, other, 3, stride=1 + (one != other), padding=1), nn.GroupNorm(8, other), nn.ReLU()
            )
            for one, other in pairwise(widths)
        ]
        self.net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32))

    def training_step(self, batch, batch_idx):
        embedded = F.normalize(self.net(torch.cat([batch["x"], batch["y"]])), dim=-1)
        similar = (embedded @ embedded.T / 0.2).fill_diagonal_(-1e9)
        return F.cross_entropy(similar, torch.arange(2 * len(batch["x"])).roll(len(batch["x"])))

    @classmethod
    def batch(cls, dtype=torch.float32):
        return {name: torch.randn(cls.rows, 3, 32, 32, dtype=dtype) for name in ("x", "y")}


class Clip(Contrastive):
    """A transformer over patches and one over tokens, and the symmetric loss over all pairs."""

    encoders, rows = ("image", "text"), 64

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = Tower(nn.Linear(48, 64), 64), Tower(nn.Embedding(1000, 64), 64)

    def training_step(self, batch, batch_idx):
        similar = self.image(batch["patches"]) @ self.text(batch["tokens"]).T / 0.1
        labels = torch.arange(len(similar))
        return (F.cross_entropy(similar, labels) + F.cross_entropy(similar.T, labels)) / 2

    @classmethod
    def batch(cls, dtype=torch.float32):
        return {"patches": torch.randn(cls.rows, 64, 48, dtype=dtype), "tokens": torch.randint(1000, (cls.rows, 32))}


class Tower(nn.Module):
    def __init__(self, embed, width):
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x.mean(1), dim=-1)


def trained(kind, strategy, *, dtype):
    module = kind().to(dtype)
    torch.manual_seed(1)
    batch = kind.batch(dtype)
    trainer = L.Trainer(
        strategy=strategy, max_epochs=1, precision="64-true" if dtype == torch.float64 else "32-true", **QUIET
    )
    trainer.fit(module, Loader(batch, STEPS))
    return module


def cell(kind, size, folder):
    torch.manual_seed(1)
    batch, chunks = kind.batch(), -(-kind.rows // size)
    strategy = UnifiedStrategy(micro_batch_size=size)
    plain, ours = (trained(kind, one, dtype=torch.float64) for one in ("auto", strategy))
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    found = {
        "rows": kind.rows,
        "chunk": size,
        "peak_bytes": live_peak(kind, batch, num_micro_batches=chunks, rows=size, folder=folder),
        "predicted_bytes": predict(kind(), batch, device="cpu", micro_batch_size=size).peak_bytes,
        "seconds": statistics.median(
            trained(kind, UnifiedStrategy(micro_batch_size=size), dtype=torch.float32).seconds[1:]
        ),
        "weights_off": max(float((one - other).abs().max()) for one, other in pairs),
    }
    print(kind.__name__, json.dumps(found), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cells = {
            kind.__name__: [cell(kind, kind.rows // share, folder) for share in (1, 4, 16)] for kind in (SimCLR, Clip)
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "architecture": platform.machine(), "threads": 1},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "steps": STEPS,
        "cells": cells,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
