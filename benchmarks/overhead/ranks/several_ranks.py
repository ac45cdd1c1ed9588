"""Measure the cost of `strategy="unified_ddp"` beside Lightning's `ddp` without shortages.

Compared are the time per step and the peak memory.

Plain DDP reduces gradients while the backward pass still runs; ours reduces them after it, so that ranks can agree first. The case
that shows the most of it is a module of many weights and little work (`weights`); `transformer` is an ordinary one. Blocks of both
strategies take turns in the same processes. With `--micro-batches 4` ours cuts each batch in four, as it would for lack of memory.
`gpt` is a decoder of 124 million parameters; it also trains once with ours within a budget of 8 GiB a rank, with all checks. The steps that
count there lie between the checks of batches 32 and 64.

Usage: python -m benchmarks.overhead.ranks.several_ranks [weights transformer gpt] [--accelerator cuda] [--ranks 2] [--pairs 8] [--steps 20]
       [--small]
       (writes two_ranks.json or four_ranks.json beside it, by the number of ranks; --small is for machines without accelerators)
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
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks.options.blocks import compiled_blocks
from lightning_unified import UnifiedDDPStrategy

MIB = 2**20
NAMES = {2: "two", 4: "four", 8: "eight"}
BUDGET_MIB = 8 * 1024  # of a rank, for the decoder; without a limit its peak is about 17 GiB


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


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, the same four batches again and again."""

    def __init__(self, rows: int, steps: int) -> None:
        shape = (4 * rows, compiled_blocks.LENGTH + 1)
        self._tokens = torch.randint(0, compiled_blocks.CLASSES, shape, generator=torch.Generator().manual_seed(1))
        self._count = rows * steps

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._tokens[index % len(self._tokens)]
        return {"input_ids": row[:-1], "labels": row[1:]}


class Clock(L.Callback):
    """Seconds per step over all steps but the first.

    It waits for the device at both ends only.

    Args:
        steps: The steps that count.
        warm: The steps before them.
    """

    def __init__(self, steps: int, *, warm: int = 3) -> None:
        self.steps, self.warm, self.start, self.seconds = steps, warm, 0.0, 0.0
        self.plan = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.warm:
            self._wait(trainer)
            self.start = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.warm + self.steps - 1:
            self._wait(trainer)
            self.seconds = (time.perf_counter() - self.start) / self.steps

    def on_train_end(self, trainer, module):
        self.plan = getattr(trainer.strategy, "plan", None)

    @staticmethod
    def _wait(trainer):
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def prepared(case: dict, steps: int, ranks: int) -> tuple[L.LightningModule, Dataset]:
    """Return the module of a case and its data."""
    torch.manual_seed(0)
    if case["kind"] == "gpt":
        return compiled_blocks.Foreign(), Tokens(case["rows"], steps * ranks)
    module = {"weights": Weights, "transformer": Transformer}[case["kind"]](case["width"], case["depth"])
    shape = (case["length"], case["width"]) if case["kind"] == "transformer" else (case["width"],)
    rows = torch.randn(4 * case["rows"], *shape)
    return module, TensorDataset(rows.repeat(-(-steps * ranks // 4), *([1] * len(shape))))


def fit(strategy: str | UnifiedDDPStrategy, case: dict, clock: Clock, options: argparse.Namespace) -> int | None:
    """Train as many steps as the clock counts; return the peak of live tensors in bytes."""
    steps = clock.warm + clock.steps
    module, data = prepared(case, steps, options.ranks)
    if options.accelerator == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.ranks,
        strategy=strategy,
        precision=case["precision"],
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=case["rows"]))
    peak = torch.cuda.max_memory_allocated() if options.accelerator == "cuda" else None
    del trainer, module
    gc.collect()
    return peak


def compare(case: dict, options: argparse.Namespace) -> dict:
    size = "auto" if options.micro_batches == 1 else -(-case["rows"] // options.micro_batches)
    seconds: dict[str, list[float]] = {"ddp": [], "unified_ddp": []}
    peaks: dict[str, int | None] = {}
    for pair in range(options.pairs):
        for name in sorted(seconds, reverse=bool(pair % 2)):
            clock = Clock(options.steps)
            ours = UnifiedDDPStrategy(micro_batch_size=size, check_split=False)
            peaks[name] = fit("ddp" if name == "ddp" else ours, case, clock, options)
            seconds[name].append(clock.seconds)
    ratios = sorted(ours / plain for plain, ours in zip(*seconds.values(), strict=True))
    found = {
        **case,
        "ddp_ms": round(1e3 * statistics.median(seconds["ddp"]), 2),
        "unified_ddp_ms": round(1e3 * statistics.median(seconds["unified_ddp"]), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(ratios[0], 3),
        "ratio_most": round(ratios[-1], 3),
        "peak_mib": {name: None if peak is None else round(peak / MIB) for name, peak in peaks.items()},
    }
    if case["kind"] == "gpt" and options.accelerator == "cuda":
        found["within"] = within(case, statistics.median(seconds["ddp"]), options)
    return found


def within(case: dict, plain: float, options: argparse.Namespace) -> dict:
    """Return the figures of ours within the budget.

    `plain` is the seconds of a step of DDP without a limit.
    """
    clock = Clock(28, warm=34)
    peak = fit(UnifiedDDPStrategy(budget=BUDGET_MIB * MIB), case, clock, options)
    assert clock.plan is not None
    return {
        "budget_mib": BUDGET_MIB,
        "unified_ddp_ms": round(1e3 * clock.seconds, 2),
        "ratio": round(clock.seconds / plain, 3),
        "peak_mib": None if peak is None else round(peak / MIB),
        "micro_batch_size": clock.plan.micro_batch_size,
        "recomputed": clock.plan.recomputed,
        "loss_chunk": clock.plan.loss_chunk,
        "planned": clock.plan.reasons.get("prediction"),
    }


def cases(options: argparse.Namespace) -> list[dict]:
    if options.small:
        return [
            {"kind": "weights", "width": 512, "depth": 8, "rows": 64, "precision": "32-true"},
            {"kind": "transformer", "width": 128, "depth": 2, "rows": 8, "length": 64, "precision": "32-true"},
        ]
    known = [
        {"kind": "weights", "width": 4096, "depth": 16, "rows": 2048, "precision": "bf16-mixed"},
        {"kind": "transformer", "width": 768, "depth": 12, "rows": 32, "length": 512, "precision": "bf16-mixed"},
        {"kind": "gpt", "rows": 16, "length": compiled_blocks.LENGTH, "precision": "bf16-mixed"},
    ]
    return [case for case in known if case["kind"] in options.kinds]


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
        "command": " ".join(["python -m benchmarks.overhead.ranks.several_ranks", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{options.ranks} x {device}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
        "micro_batches": options.micro_batches,
        "cases": found,
    }
    print(json.dumps(result, indent=2))
    if not options.small:
        target = Path(__file__).with_name(f"{NAMES[options.ranks]}_ranks.json")
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("weights", "transformer", "gpt")
    parser.add_argument("kinds", nargs="*", default=kinds, metavar="KIND", help=f"of {', '.join(kinds)} (default: all)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=NAMES, default=2, help="processes, one a device (default: 2)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps a block (default: 20)")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each batch of ours (default: 1)")
    parser.add_argument("--small", action="store_true", help="modules for a CPU; prints, and writes nothing")
    chosen = parser.parse_args()
    if unknown := set(chosen.kinds) - set(kinds):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; choose from {', '.join(kinds)}")
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
