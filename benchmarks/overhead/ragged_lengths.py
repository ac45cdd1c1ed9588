"""Rows of very different lengths in a budget: a fit set by hand beside the strategy's.

A decoder of 60 M parameters trains on 60 batches of 16 rows of 100 to 1,600 tokens. Each batch is padded to its longest row. By hand:
activation checkpointing, a quarter of each batch at a time, and gradient accumulation. Under the strategy: nothing is set but the budget.
Each cell runs in a process of its own. The record holds the seconds of the whole fit, of a step, and of all planning.

Usage: python -m benchmarks.overhead.ragged_lengths [--small]      (writes benchmarks/overhead/ragged_lengths.json; two minutes on a GPU)

With --small, a tiny decoder trains on the CPU, as on a simulated GPU, and nothing is written.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from benchmarks.records import origin, prepare
from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.planner.first_batch.first_step import FirstStep

ROWS, BY_HAND = 16, 4  # rows of a batch; rows at a time in the fit set by hand
WARM = 10  # batches before the seconds of a step are counted
CELLS = ("by hand", "unified", "by hand again", "unified again")
FULL = {"layers": 10, "width": 640, "vocabulary": 64_000, "scale": 1, "steps": 60, "budget": "8GiB"}
SMALL = {"layers": 2, "width": 128, "vocabulary": 500, "scale": 8, "steps": 12, "budget": "48MiB"}


class Decoder(L.LightningModule):
    """A decoder of transformers that learns to predict the next token."""

    def __init__(self, sizes: dict[str, Any], *, checkpointing: bool) -> None:
        super().__init__()
        width = sizes["width"]
        config = transformers.Qwen3Config(
            vocab_size=sizes["vocabulary"],
            hidden_size=width,
            intermediate_size=27 * width // 10,
            num_hidden_layers=sizes["layers"],
            num_attention_heads=width // 64,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
        )
        self.net = transformers.Qwen3ForCausalLM(config)
        self.losses: list[float] = []
        if checkpointing:
            self.net.gradient_checkpointing_enable()
        self.net.train()

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:
        return MicroBatchRules(loss_weight=lambda batch: int((batch["labels"][:, 1:] != -100).sum()))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-4)


class Texts(Dataset):
    """Batches of random tokens, each padded to its longest row, in consecutive `pieces`."""

    def __init__(self, sizes: dict[str, Any], *, pieces: int) -> None:
        drawn = random.Random(5)
        self._sizes, self._pieces = sizes, pieces
        self._lengths = [
            [(drawn.choice((100, 300, 700, 1500)) + drawn.randrange(100)) // sizes["scale"] for _ in range(ROWS)]
            for _ in range(sizes["steps"])
        ]

    def __len__(self) -> int:
        return len(self._lengths) * self._pieces

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        at, piece = divmod(index, self._pieces)
        rows = ROWS // self._pieces
        generator = torch.Generator().manual_seed(at)
        tokens = torch.randint(5, self._sizes["vocabulary"], (ROWS, max(self._lengths[at])), generator=generator)
        lengths = self._lengths[at][piece * rows : (piece + 1) * rows]
        tokens = tokens[piece * rows : (piece + 1) * rows, : max(lengths)]
        mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        return {
            "input_ids": tokens * mask,
            "attention_mask": mask.long(),
            "labels": torch.where(mask, tokens, -100),
        }


class Clock(Callback):
    """Takes the time at the end of a batch, and keeps the last loss."""

    def __init__(self, pieces: int, steps: int) -> None:
        self._warm, self._last, self.loss = WARM * pieces - 1, steps * pieces - 1, float("nan")
        self._pieces = pieces
        self.at: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (self._warm, self._last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.at["warm" if batch_idx == self._warm else "last"] = time.perf_counter()
        if batch_idx == self._last:
            self.loss = float(outputs["loss"]) * self._pieces  # Lightning divides it by the pieces that accumulate


def run_cell(name: str, *, small: bool) -> dict[str, Any]:
    """Fit once, and return its seconds and bytes."""
    prepare("ragged")
    torch.manual_seed(0)
    sizes, by_hand = SMALL if small else FULL, name.startswith("by hand")
    pieces = ROWS // BY_HAND if by_hand else 1
    planning = [0.0]
    _count_planning(planning)
    module = Decoder(sizes, checkpointing=by_hand)
    clock = Clock(pieces, sizes["steps"])
    strategy: Any = "auto"
    if not by_hand:
        strategy = UnifiedStrategy(budget=sizes["budget"], **({"simulate": "h200"} if small else {}))
    elif not small:
        share = 8 * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    trainer = L.Trainer(
        accelerator="cpu" if small else "gpu",
        devices=1,
        precision="32-true" if small else "bf16-mixed",
        strategy=strategy,
        max_steps=sizes["steps"],
        accumulate_grad_batches=pieces,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    loader = DataLoader(Texts(sizes, pieces=pieces), batch_size=None, num_workers=0 if small else 2)
    begun = time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - begun
    found = {
        "cell": name,
        "fit_seconds": round(seconds, 2),
        "step_seconds": round((clock.at["last"] - clock.at["warm"]) / max(sizes["steps"] - WARM, 1), 4),
        "planning_seconds": round(planning[0], 2),
        "last_loss": round(clock.loss, 4),
        "peak_gib": None if small else round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": None if small else round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }
    if by_hand:
        return found
    return found | {"recoveries": strategy.recoveries, "events": [str(event)[:300] for event in strategy.events]}


def _count_planning(seconds: list[float]) -> None:
    """Add the seconds of every look at a batch to `seconds`."""
    look = FirstStep.look

    def timed(self: FirstStep, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        try:
            look(self, *args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - begun

    FirstStep.look = timed  # type: ignore[method-assign]


def main() -> None:
    """Run the cells one after the other, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="a tiny decoder on the CPU; writes nothing")
    parser.add_argument("--cell", choices=CELLS, help="run only this cell, in this process")
    asked = parser.parse_args()
    if asked.cell is not None:
        print(json.dumps(run_cell(asked.cell, small=asked.small)), flush=True)
        return
    record = origin("python -m benchmarks.overhead.ragged_lengths")
    record["machine"]["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    record["setting"], record["runs"] = SMALL if asked.small else FULL, []
    for name in CELLS[:2] if asked.small else CELLS:
        command = [sys.executable, "-m", "benchmarks.overhead.ragged_lengths", "--cell", name]
        done = subprocess.run(
            command + ["--small"] * asked.small, env=dict(os.environ), capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        record["runs"].append(json.loads(lines[-1]) if lines else {"cell": name, "error": done.stderr[-2000:]})
        print(json.dumps(record["runs"][-1], indent=1), flush=True)
        if not asked.small:
            Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
