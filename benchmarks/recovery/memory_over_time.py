"""Record the memory of three runs while long batches arrive, for README's picture.

    python -m benchmarks.recovery.memory_over_time [--output FILE]     # needs a CUDA device; about a minute
    python -m benchmarks.recovery.memory_over_time --draw                              # draws the picture from the record

GearHead-34M trains on batches of 32 rows. Most rows have 128 tokens; the batches of `LONG` have 512. Dropout is off. torch's allocator is capped at
60 % of the peak without a cap, so a step that needs more raises a real `torch.OutOfMemoryError`. The runs differ in their strategy only:

- plain: Lightning's own strategy for one device.
- recovery alone: `UnifiedStrategy(predict=False)`, which learns a size that fits from the error.
- planned: `UnifiedStrategy()`, the default.

A thread samples the allocator's live bytes. CUDA launches are synchronous (`CUDA_LAUNCH_BLOCKING=1`), so that a sample belongs to its step.
"""

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks import records
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified import UnifiedStrategy

RESULTS = Path(__file__).with_suffix(".json")
PICTURES = Path(__file__).parents[2] / "docs" / "images"
METHODS = {"plain": None, "recovery alone": {"predict": False}, "planned": {}}
ROWS, SHORT, LONGEST, STEPS, LONG = 32, 128, 512, 20, (8, 9, 15)
SHARE = 0.6  # the limit, of the peak of the run without one
MIB = 2**20
KEPT = 40  # samples of each step
EVERY_S = 2e-4
SAMPLES: list[tuple[float, int]] = []  # not an attribute of the callback: the strategy undoes those with a step


def sample(stop: threading.Event) -> None:
    """Sample the live bytes until `stop` is set."""
    while not stop.wait(EVERY_S):
        SAMPLES.append((time.perf_counter(), torch.cuda.memory_allocated()))


class Steps(L.Callback):
    """Notes the memory of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._begin, self._recoveries = 0.0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        recoveries = getattr(trainer.strategy, "recoveries", 0)
        self._note(
            loss=round(float(trainer.callback_metrics["train/loss"]), 5),
            recoveries=recoveries - self._recoveries,
            micro_batch_size=getattr(trainer.strategy, "micro_batch_size", ROWS),
        )
        self._recoveries = recoveries

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._note(error=type(exception).__name__)

    def _note(self, **facts: Any) -> None:
        end = time.perf_counter()
        inside = [held for at, held in SAMPLES if self._begin <= at <= end]
        self.steps.append({**facts, "seconds": round(end - self._begin, 4), "mib": thinned(inside)})


def thinned(samples: list[int]) -> list[int]:
    """Return at most `KEPT` values in MiB: the maxima of equal shares of the samples.

    Repeated values count once.
    """
    changes = [held for number, held in enumerate(samples) if number == 0 or held != samples[number - 1]]
    shares = [changes[len(changes) * share // KEPT : len(changes) * (share + 1) // KEPT] for share in range(KEPT)]
    return [round(max(share) / MIB) for share in shares if share]


class Batches(torch.utils.data.Dataset):
    """Batches of random tokens, whole."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        whole = MODULES["gearhead-34m"].batch("cuda", ROWS)
        if step in LONG:
            return whole
        return {key: value[:, :SHORT] if value.dim() == 2 else value for key, value in whole.items()}


def fit(method: str, limit: int | None) -> dict[str, Any]:
    """Train by `method` inside `limit` bytes; return what happened in each step."""
    module, steps, options = MODULES["gearhead-34m"].build("cuda"), Steps(), METHODS[method]
    for one in module.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.0  # so that the losses of the runs can be compared
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy="auto" if options is None else UnifiedStrategy(budget=limit, **options),
        callbacks=[steps],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error, stop = None, threading.Event()
    thread = threading.Thread(target=sample, args=(stop,))
    thread.start()
    try:
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    except torch.OutOfMemoryError as raised:
        error = f"{type(raised).__name__}: {raised}"[:200]
    finally:
        stop.set()
        thread.join()
    return {
        "method": method,
        "error": error,
        "events": list(getattr(trainer.strategy, "events", [])),
        "peak_mib": round(torch.cuda.max_memory_allocated() / MIB),
        "steps": steps.steps,
    }


def _child(method: str, limit: int | None, pipe: Any) -> None:
    records.prepare("memory-over-time")
    pipe.send(fit(method, limit))


def _in_process(method: str, limit: int | None) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(method, limit, theirs))
    process.start()
    theirs.close()
    run = ours.recv()
    process.join()
    return run


def record(output: Path) -> None:
    """Run every method in a process of its own, and write the record."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    whole = _in_process("plain", None)
    limit = round(SHARE * whole["peak_mib"]) * MIB
    runs = [_in_process(method, limit) for method in METHODS]
    about = records.origin("python -m benchmarks.recovery.memory_over_time")
    about["machine"]["gpu"] = torch.cuda.get_device_name(0)
    about |= {
        "limit_bytes": limit,
        "peak_without_limit_bytes": whole["peak_mib"] * MIB,
        "losses_without_limit": [step["loss"] for step in whole["steps"]],
        "rows": ROWS,
        "tokens": [SHORT, LONGEST],
        "long_steps": list(LONG),
    }
    records.write({**about, "runs": runs}, output)


def main() -> int:
    """Record, or draw the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the picture from the record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the record")
    options = parser.parse_args()
    if options.draw:
        from benchmarks.recovery.memory_picture import draw

        for path in draw(json.loads(options.output.read_text(encoding="utf-8")), PICTURES):
            print(path)
    else:
        record(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
