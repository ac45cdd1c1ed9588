"""What `strategy="unified"` costs when nothing is split: its time a step against plain Lightning's, pair by pair in one process.

Once by itself, and once with everything on: the pressure guard's thread, the memory monitor and the watch over gradients.

Blocks of plain and unified steps take turns, so that a drift of the machine's speed meets both; the order within a pair alternates.
Prints the median ratio with a 95 % bootstrap interval for a step of at least 20 ms, and the extra microseconds of a tiny one.

Usage: python benchmarks/overhead.py [--blocks 24] [--steps 20]      (writes benchmarks/results/overhead.json)
"""

import argparse
import json
import logging
import platform
import random
import statistics
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_unified import GradientHealth, MemoryMonitor, PressureGuard

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(L.LightningModule):
    """A stack of linear layers with dropout and BatchNorm: buffers and random numbers are watched too."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(depth)
        ]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


class StepTimes(L.Callback):
    """The time from the end of one batch to the end of the next: everything is inside, the loader and all callbacks too."""

    def __init__(self) -> None:
        self.seconds, self._end = [], time.perf_counter()

    def on_train_batch_end(self, *_):
        now = time.perf_counter()
        self.seconds.append(now - self._end)
        self._end = now


def callbacks_of(strategy: str) -> list[L.Callback]:
    return [PressureGuard(), MemoryMonitor(), GradientHealth()] if strategy == "everything on" else []


def block(strategy: str, module: L.LightningModule, loader, steps: int) -> float:
    """Return the median seconds of a step over `steps` steps after three that are not counted."""
    times = StepTimes()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if strategy == "plain" else "unified",
        max_steps=steps + 3,
        callbacks=[*callbacks_of(strategy), times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return statistics.median(times.seconds[3:])


def compare(how: str, width: int, depth: int, rows: int, *, blocks: int, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    module = Net(width, depth)
    data = torch.utils.data.TensorDataset(torch.randn(rows * (steps + 3), width))
    loader = torch.utils.data.DataLoader(data, batch_size=rows)
    pairs = []
    for index in range(blocks):
        order = ("plain", how) if index % 2 == 0 else (how, "plain")
        seconds = {strategy: block(strategy, module, loader, steps) for strategy in order}
        pairs.append((seconds["plain"], seconds[how]))
    ratios = [unified / plain for plain, unified in pairs]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "steps_each": blocks * steps,
        "plain_ms": 1e3 * statistics.median(plain for plain, _ in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": medians[50],
        "ratio_high": medians[1949],
        "extra_microseconds": 1e6 * statistics.median(unified - plain for plain, unified in pairs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks (default: 24)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps a block (default: 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        **{
            f"{name}, {how}": compare(how, *sizes, blocks=options.blocks, steps=options.steps)
            for name, sizes in (("step of 20 ms and more", (512, 8, 256)), ("tiny step", (16, 2, 8)))
            for how in ("unified", "everything on")
        },
    }
    print(json.dumps(result, indent=2))
    target = Path(__file__).parent / "results" / "overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
