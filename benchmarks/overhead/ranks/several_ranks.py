"""Measure the cost of `strategy="unified_ddp"` beside Lightning's `ddp` without shortages.

Compared are the time per step and the peak memory.

Plain DDP reduces gradients while the backward pass still runs; ours reduces them after it, so that ranks can agree first. The case
that shows the most of it is a module of many weights and little work (`weights`); `transformer` is an ordinary one. Blocks of both
strategies take turns in the same processes. With `--micro-batches 4` ours cuts each batch in four, as it would for lack of memory.

Usage: python -m benchmarks.overhead.ranks.several_ranks [--accelerator cuda] [--ranks 2] [--pairs 8] [--steps 20] [--small]
       (writes benchmarks/overhead/ranks/several_ranks.json; --small is for machines without accelerators)
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_unified import UnifiedDDPStrategy

MIB = 2**20


class Weights(L.LightningModule):
    """Wide linear layers, with much gradient to reduce for few rows.

    The backward pass of a few rows has as many numbers as there are gradients to reduce.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class Transformer(Weights):
    """An encoder over rows of vectors."""

    def __init__(self, width: int, depth: int) -> None:
        L.LightningModule.__init__(self)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Clock(L.Callback):
    """Seconds per step over all steps but the first three.

    It waits for the device at both ends only.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.start, self.seconds = steps, 0.0, 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            self._wait(trainer)
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.steps + 2:
            self._wait(trainer)
            self.seconds = (time.perf_counter() - self.start) / self.steps

    @staticmethod
    def _wait(trainer):
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def block(name: str, case: dict, options: argparse.Namespace) -> tuple[float, int | None]:
    """Return the seconds of a step, and the peak of live tensors."""
    torch.manual_seed(0)
    module = {"weights": Weights, "transformer": Transformer}[case["kind"]](case["width"], case["depth"])
    shape = (case["length"], case["width"]) if case["kind"] == "transformer" else (case["width"],)
    rows, steps = case["rows"], options.steps + 3
    data = torch.utils.data.TensorDataset(
        torch.randn(4 * rows, *shape).repeat(-(-steps * options.ranks // 4), *([1] * len(shape)))
    )
    clock = Clock(options.steps)
    size = "auto" if options.micro_batches == 1 else -(-rows // options.micro_batches)
    if options.accelerator == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.ranks,
        strategy="ddp" if name == "ddp" else UnifiedDDPStrategy(micro_batch_size=size, check_split=False),
        precision=case["precision"],
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=rows))
    peak = torch.cuda.max_memory_allocated() if options.accelerator == "cuda" else None
    del trainer, module
    gc.collect()
    return clock.seconds, peak


def compare(case: dict, options: argparse.Namespace) -> dict:
    seconds: dict[str, list[float]] = {"ddp": [], "unified_ddp": []}
    peaks: dict[str, int | None] = {}
    for pair in range(options.pairs):
        for name in sorted(seconds, reverse=bool(pair % 2)):
            taken, peaks[name] = block(name, case, options)
            seconds[name].append(taken)
    ratios = sorted(ours / plain for plain, ours in zip(*seconds.values(), strict=True))
    return {
        **case,
        "ddp_ms": round(1e3 * statistics.median(seconds["ddp"]), 2),
        "unified_ddp_ms": round(1e3 * statistics.median(seconds["unified_ddp"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(ratios[0], 3),
        "ratio_most": round(ratios[-1], 3),
        "peak_mib": {name: None if peak is None else round(peak / MIB) for name, peak in peaks.items()},
    }


def cases(options: argparse.Namespace) -> list[dict]:
    if options.small:
        return [
            {"kind": "weights", "width": 512, "depth": 8, "rows": 64, "precision": "32-true"},
            {"kind": "transformer", "width": 128, "depth": 2, "rows": 8, "length": 64, "precision": "32-true"},
        ]
    return [
        {"kind": "weights", "width": 4096, "depth": 16, "rows": 2048, "precision": "bf16-mixed"},
        {"kind": "transformer", "width": 768, "depth": 12, "rows": 32, "length": 512, "precision": "bf16-mixed"},
    ]


def run(rank: int, port: int, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if options.accelerator == "cpu":
        torch.set_num_threads(1)
    found = [compare(case, options) for case in cases(options)]
    if rank != 0:
        return
    device = torch.cuda.get_device_name(0) if options.accelerator == "cuda" else platform.machine()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{options.ranks} x {device}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "micro_batches": options.micro_batches,
        "cases": found,
    }
    print(json.dumps(result, indent=2))
    if not options.small:
        target = Path(__file__).with_suffix(".json")
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one a device (default: 2)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps a block (default: 20)")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each batch of ours (default: 1)")
    parser.add_argument("--small", action="store_true", help="modules for a CPU; prints, and writes nothing")
    chosen = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run, args=(rank, free, chosen)) for rank in range(chosen.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
