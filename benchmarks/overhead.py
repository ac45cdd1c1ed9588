"""What `strategy="unified"` costs when nothing is split: its time a step against plain Lightning's, pair by pair in one process.

By itself, with the pressure guard's thread and the memory monitor beside it, and with everything on: the watch over gradients too, which
reads all of them once.

Blocks of plain and unified steps take turns, so that a drift of the machine's speed meets both; the order within a pair alternates.
Prints the median ratio with a 95 % bootstrap interval for steps of at least 20 and 100 ms, and the extra microseconds of a tiny one.

On a CPU a block counts by its median step; what is done every few steps only (a counter is read, a figure logged, the guard's
thread takes a sample) is in `ratio_of_means`, the same of mean steps, which other programs disturb more. On a GPU a block is
timed as a whole, from one wait for the device to the next, because its steps overlap.

Usage: python benchmarks/overhead.py [--device cuda] [--blocks 16] [--steps 20]
       (writes benchmarks/results/overhead.json, or overhead_cuda.json; under 4 minutes on one thread of a Xeon)
"""

import argparse
import itertools
import json
import logging
import math
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
        self.ends = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.strategy.root_device.type == "cuda" and trainer.global_step in {WARM_UP, trainer.max_steps}:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self, device: str) -> tuple[float, float]:
        """Return the step that counts, and the mean one."""
        counted = self.ends[WARM_UP - 1 :]
        mean = (counted[-1] - counted[0]) / (len(counted) - 1)
        if device == "cuda":
            return mean, mean
        return statistics.median(end - begin for begin, end in itertools.pairwise(counted)), mean


SIZES = {  # width, depth, rows, and the part of the blocks and of their steps that is enough
    "cpu": {
        "step of 20 ms and more": (512, 8, 256, 1),
        "step of 100 ms and more": (512, 8, 1024, 1 / 2),
        "tiny step": (16, 2, 8, 1),
    },
    "cuda": {"step of 20 ms and more": (4096, 8, 2048, 1)},
}
WARM_UP = 3  # steps that are not counted
CALLBACKS = {
    "plain": [],
    "unified": [],
    "with guard and monitor": [PressureGuard, MemoryMonitor],
    "everything on": [PressureGuard, MemoryMonitor, GradientHealth],
}


def block(strategy: str, module: L.LightningModule, loader, steps: int, *, device: str) -> tuple[float, float]:
    """Return the seconds of a step: on a CPU the median over `steps` steps, on a GPU their mean; and their mean."""
    times = StepTimes()
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        strategy="auto" if strategy == "plain" else "unified",
        max_steps=steps + WARM_UP,
        callbacks=[*(callback() for callback in CALLBACKS[strategy]), times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return times.seconds(device)


def compare(
    how: str, width: int, depth: int, rows: int, part: float, *, blocks: int, steps: int, device: str
) -> dict[str, float]:
    blocks, steps = math.ceil(blocks * part), math.ceil(steps * part)
    torch.manual_seed(0)
    module = Net(width, depth)
    batch = (torch.randn(rows, width, device=device),)  # on the device, as a loader with pinned memory has it in time
    loader = torch.utils.data.DataLoader([batch] * (steps + WARM_UP), batch_size=None)
    pairs = []
    for index in range(blocks):
        order = ("plain", how) if index % 2 == 0 else (how, "plain")
        seconds = {strategy: block(strategy, module, loader, steps, device=device) for strategy in order}
        pairs.append((seconds["plain"], seconds[how]))
    ratios = [unified / plain for (plain, _), (unified, _) in pairs]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "steps_each": blocks * steps,
        "plain_ms": 1e3 * statistics.median(plain for (plain, _), _ in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": medians[50],
        "ratio_high": medians[1949],
        "ratio_of_means": statistics.median(unified / plain for (_, plain), (_, unified) in pairs),
        "extra_microseconds": 1e6 * statistics.median(unified - plain for (plain, _), (unified, _) in pairs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--blocks", type=int, default=16, help="pairs of blocks (default: 16)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps a block (default: 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, 1 thread"
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        **{
            f"{name}, {how}": compare(how, *sizes, blocks=options.blocks, steps=options.steps, device=options.device)
            for name, sizes in SIZES[options.device].items()
            for how in list(CALLBACKS)[1:]
        },
    }
    print(json.dumps(result, indent=2))
    target = Path(__file__).parent / "results" / ("overhead.json" if options.device == "cpu" else "overhead_cuda.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
