"""Measure the cost of `strategy="unified"` when nothing is split.

Its time per step is compared with plain Lightning's, pair by pair in one process.

By itself, with the pressure guard's thread and the memory monitor beside it, and with everything on: the watch over gradients too, which
reads all of them once.

On a CPU a plain and a unified run take turns step by step, in two processes on one core, of which one waits: what disturbs the machine
for longer than a step meets both. The ratio is the median over pairs of neighbouring steps, `ratio_of_means` that of their sums,
in which is what is done every few steps only (a counter is read, a figure logged, the guard's thread takes a sample), and other programs'
disturbances. The C library keeps what is freed, in both: whether it gives the heap's top back after a step, and so takes pages anew in
the next, depends on what happens to lie there, and costs from nothing to a seventh of a step, in either run. On a GPU steps overlap: there whole blocks of steps take turns, each timed from one wait for the device to the next.
Prints medians with 95 % bootstrap intervals for steps of at least 20 and 100 ms, and the extra microseconds of a tiny one.

Usage: python -m benchmarks.overhead.overhead [--device cuda] [--blocks 16] [--steps 20]
       (writes benchmarks/overhead/overhead.json, or overhead_cuda.json; about 4 minutes on one thread of a Xeon)
"""

import argparse
import json
import logging
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import warnings
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from benchmarks.records import origin
from lightning_unified import GradientHealth, MemoryMonitor, PressureGuard

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(L.LightningModule):
    """A stack of linear layers with dropout and BatchNorm.

    Buffers and random numbers must be watched too.
    """

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


class Turns(L.Callback):
    """One of two runs that alternate, one step each.

    It measures the time from its turn to the end of its step, with the loader and all callbacks.
    """

    def __init__(self, mine: Semaphore, other: Semaphore) -> None:
        self._mine, self._other = mine, other
        self._began = 0.0
        self.seconds: list[float] = []

    def on_train_start(self, *_):
        self._mine.acquire()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.seconds.append(time.perf_counter() - self._began)
        self._other.release()
        self._mine.acquire()
        self._began = time.perf_counter()


class BlockTime(L.Callback):
    """The mean time of a block's steps, from one wait for the device to another."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in {WARM_UP, trainer.max_steps}:
            torch.cuda.synchronize()
            self._ends.append(time.perf_counter())

    def seconds(self, steps: int) -> float:
        began, ended = self._ends
        return (ended - began) / steps


SIZES = {  # width, depth, rows, and the part of the blocks and of their steps that is enough
    "cpu": {
        "step of 20 ms and more": (512, 8, 256, 1),
        "step of 100 ms and more": (512, 8, 1024, 1 / 2),
        "tiny step": (16, 2, 8, 1),
    },
    "cuda": {"step of 20 ms and more": (4096, 8, 2048, 1)},
}
WARM_UP = 3  # steps that are not counted
PATIENCE = 1800  # seconds for two processes to be done
CALLBACKS = {
    "plain": [],
    "unified": [],
    "with guard and monitor": [PressureGuard, MemoryMonitor],
    "everything on": [PressureGuard, MemoryMonitor, GradientHealth],
}


def fit(how: str, module: L.LightningModule, loader: Any, times: L.Callback, *, device: str) -> None:
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        strategy="auto" if how == "plain" else "unified",
        max_steps=len(loader),
        callbacks=[*(callback() for callback in CALLBACKS[how]), times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def run(how: str, mine: Semaphore, other: Semaphore, sizes: tuple[int, int, int], steps: int, results: Any) -> None:
    """Train alternately with another process, and send the seconds of counted steps.

    Both use the first available core.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    turns = Turns(mine, other)
    try:
        module, batch = built(*sizes, device="cpu")
        fit(how, module, batches(batch, steps + WARM_UP), turns, device="cpu")
        results.put((how, turns.seconds[WARM_UP:]))
    finally:
        other.release()


def by_steps(how: str, sizes: tuple[int, int, int], *, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of neighbouring steps, a plain and a unified one each."""
    os.environ |= {
        "MALLOC_TRIM_THRESHOLD_": str(8 * 2**30),
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    }  # glibc's largest
    context = multiprocessing.get_context("spawn")
    first, second, results = context.Semaphore(1), context.Semaphore(0), context.Queue()
    processes = [
        context.Process(target=run, args=("plain", first, second, sizes, steps, results)),
        context.Process(target=run, args=(how, second, first, sizes, steps, results)),
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=PATIENCE) for _ in processes)
    for process in processes:
        process.join()
    return list(zip(found["plain"], found[how], strict=True))


def by_blocks(how: str, sizes: tuple[int, int, int], *, blocks: int, steps: int) -> list[tuple[float, float]]:
    """Return seconds per step in neighbouring blocks, one plain and one unified.

    The order within a pair alternates.
    """
    module, batch = built(*sizes, device="cuda")
    pairs = []
    for index in range(blocks):
        seconds = {}
        for name in ("plain", how) if index % 2 == 0 else (how, "plain"):
            times = BlockTime()
            fit(name, module, batches(batch, steps + WARM_UP), times, device="cuda")
            seconds[name] = times.seconds(steps)
        pairs.append((seconds["plain"], seconds[how]))
    return pairs


def built(width: int, depth: int, rows: int, *, device: str) -> tuple[L.LightningModule, Any]:
    torch.manual_seed(0)
    # the batch is on the device, as a loader with pinned memory has it in time
    return Net(width, depth), (torch.randn(rows, width, device=device),)


def batches(batch: Any, count: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader([batch] * count, batch_size=None)


def compare(
    how: str, width: int, depth: int, rows: int, part: float, *, blocks: int, steps: int, device: str
) -> dict[str, float]:
    blocks, steps = math.ceil(blocks * part), math.ceil(steps * part)
    sizes = (width, depth, rows)
    if device == "cpu":
        pairs = by_steps(how, sizes, steps=blocks * steps)
    else:
        pairs = by_blocks(how, sizes, blocks=blocks, steps=steps)
    ratios = [unified / plain for plain, unified in pairs]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "parameters": sum(parameter.numel() for parameter in Net(width, depth).parameters()),
        "steps_each": blocks * steps,
        "plain_ms": 1e3 * statistics.median(plain for plain, _ in pairs),
        "ratio": statistics.median(ratios),
        "ratio_low": medians[50],
        "ratio_high": medians[1949],
        "ratio_of_means": sum(unified for _, unified in pairs) / sum(plain for plain, _ in pairs),
        "extra_microseconds": 1e6 * statistics.median(unified - plain for plain, unified in pairs),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of each (default: 16)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps a block (default: 20)")
    options = parser.parse_args()
    result = {
        **origin(" ".join(["python", *sys.argv])),
        **({"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}),
        **{
            f"{name}, {how}": compare(how, *sizes, blocks=options.blocks, steps=options.steps, device=options.device)
            for name, sizes in SIZES[options.device].items()
            for how in list(CALLBACKS)[1:]
        },
    }
    print(json.dumps(result, indent=2))
    target = Path(__file__).with_name("overhead.json" if options.device == "cpu" else "overhead_cuda.json")
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")
