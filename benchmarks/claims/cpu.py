"""Measure on a CPU the sizes, memory figures and weighting rules of docs/lab/claims.md.

    python -m benchmarks.claims.cpu [--output benchmarks/claims/cpu.json]

Takes some four minutes on two cores, most of them for `accumulation_memory`.
"""

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.records import record_measures
from lightning_unified import UnifiedStrategy
from lightning_unified.cost_model import static_bytes
from lightning_unified.hardware import read
from lightning_unified.models.gearhead import GearHead
from lightning_unified.models.gearhead.sizes import GearHeadConfig
from lightning_unified.models.training import adamw, decay_groups

GEARHEAD = Path(__file__).parents[1] / "models" / "gearhead" / "memory.json"
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Batches(Dataset):
    """A data set whose items are whole batches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def loader(self):
        return DataLoader(self, batch_size=None)


def sizes():
    """Parameters of the seed's configurations, and fixed bytes in fp32 with AdamW.

    Parameters follow GearHead's formula.
    """
    shapes = {
        "384/6, inner 3072, positions 512": (32_000, 512, 384, 6, 6, 3072),
        "the same, inner 1536 as its YAML says": (32_000, 512, 384, 6, 6, 1536),
        "the same, positions 1024": (32_000, 1024, 384, 6, 6, 3072),
        "768/12, positions 2048": (32_000, 2048, 768, 12, 12, 3072),
        "768/12, positions 512, vocabulary 680": (680, 512, 768, 12, 12, 3072),
        "768/12, positions 512, vocabulary 912": (912, 512, 768, 12, 12, 3072),
    }
    names = ("vocabulary", "positions", "width", "layers", "heads", "feed_forward")
    counts = {name: GearHeadConfig(**dict(zip(names, shape, strict=True))).parameters for name, shape in shapes.items()}
    fixed = {}
    for name in ("gearhead-34m", "gearhead-118m"):
        with torch.device("meta"):
            module = GearHead(preset=name)
        groups = decay_groups(module.network.parameters(), weight_decay=module.hparams["weight_decay"])
        optimizer = adamw(groups, hparams={**module.hparams, "optimizer_kernel": "forloop"})
        fixed[name] = static_bytes(module, [optimizer])
    config = GearHead(preset="gearhead-34m").config
    untrained = config.num_error_codes * config.width + config.num_diagnoses * (config.width + 1)
    return {"parameters": counts, "fixed_bytes": fixed, "error table and diagnostic head of gearhead-34m": untrained}


def highest(profiler: Any):
    """The peak of live bytes: every allocation and release, added up in the order of time."""
    live = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def accumulation_memory():
    """Peak of live bytes of two steps of gearhead-34m, whole and in micro-batches.

    The batch is 8 x 512.
    """
    rows = []
    for size in (8, 2, 1):
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            torch.manual_seed(0)
            module = GearHead(preset="gearhead-34m", warmup_steps=1)
            ids = torch.randint(9, module.config.vocabulary, (8, 512))
            data = Batches([{"input_ids": ids, "labels": ids}] * 2)
            trainer = L.Trainer(max_epochs=1, strategy=UnifiedStrategy(micro_batch_size=size), **QUIET)
            trainer.fit(module, data.loader())
        fixed = sum(static_bytes(module, trainer.optimizers).values())
        peak = highest(profiler.profiler)
        rows.append({"micro_batch": size, "peak_bytes": peak, "fixed_bytes": fixed, "rest_bytes": peak - fixed})
        del module, trainer
    first, last = rows[0], rows[-1]
    return {
        "rows": rows,
        "whole_over_one_by_one_peak": first["peak_bytes"] / last["peak_bytes"],
        "whole_over_one_by_one_rest": first["rest_bytes"] / last["rest_bytes"],
    }


def recomputation_savings():
    """Shares that recomputation saves, from benchmarks/models/gearhead/memory.json."""
    cases = {case["name"]: case for case in json.loads(GEARHEAD.read_text())["cases"]}
    whole, less = cases["training step, no recomputation"], cases["training step, textbook order"]
    fixed = less["live_at_start_bytes"]
    return {
        "of_the_training_steps_peak": 1 - less["peak_bytes"] / whole["peak_bytes"],
        "of_what_is_not_fixed": 1 - (less["peak_bytes"] - fixed) / (whole["peak_bytes"] - fixed),
    }


def small():
    torch.manual_seed(0)
    return GearHead(
        preset="gearhead-small",
        vocabulary=64,
        positions=64,
        width=32,
        layers=2,
        heads=2,
        feed_forward=64,
        dropout=0.0,
        warmup_steps=0,
        schedule="constant",
    ).double()


def tokens(lengths):
    ids = torch.randint(9, 64, (len(lengths), 64), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels}


def gradient(parts, *, divide_by, zero_before_last=False):
    """Gradient and summed loss of a hand-written accumulation loop.

    Each micro-batch's own token mean is divided by the number of micro-batches; each has one backward pass.
    """
    module = small()
    losses = []
    for number, part in enumerate(parts):
        loss = module.training_step(dict(part)) / divide_by
        if zero_before_last and number == len(parts) - 1:
            module.zero_grad()
        loss.backward()
        losses.append(loss.item())
    return flat(module), losses


def flat(module):
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in module.parameters()]
    )


class Kept(L.Callback):
    def __init__(self):
        self.gradients = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(flat(pl_module).clone())


def trained(batches, *, window=1, strategy: str | UnifiedStrategy = "auto"):
    """The last step's gradient under a Trainer."""
    module, kept = small(), Kept()
    options = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": window}
    L.Trainer(strategy=strategy, callbacks=[kept], **options, **QUIET).fit(module, Batches(batches).loader())
    return kept.gradients[-1]


def cut(batch, size):
    rows = len(batch["labels"])
    return [{name: value[at : at + size] for name, value in batch.items()} for at in range(0, rows, size)]


def loss_rules():
    """Relative gradient error against the undivided batch, for each weighting rule."""
    ragged, even = tokens([4, 6, 10, 16, 24, 40, 60, 64]), tokens([64] * 8)
    whole_ragged, losses_ragged = gradient([ragged], divide_by=1)
    whole_even, losses_even = gradient([even], divide_by=1)
    short = {name: value[:6] for name, value in even.items()}
    whole_short, _ = gradient([short], divide_by=1)

    def error(found, right):
        return float((found - right).norm() / right.norm())

    averaged, losses = gradient(cut(ragged, 2), divide_by=4)
    lost, _ = gradient(cut(even, 2), divide_by=4, zero_before_last=True)
    too_small, _ = gradient(cut(short, 2), divide_by=4)
    _, scaled = gradient(cut(even, 2), divide_by=4)
    ours = UnifiedStrategy
    return {
        "seed, loss / 4, ragged rows: gradient error": error(averaged, whole_ragged),
        "seed, loss / 4, ragged rows: loss error": abs(sum(losses) / losses_ragged[0] - 1),
        "ours, ragged rows, micro-batch 2": error(trained([ragged], strategy=ours(micro_batch_size=2)), whole_ragged),
        "ours, ragged rows, micro-batch 3 (a short last one)": error(
            trained([ragged], strategy=ours(micro_batch_size=3)), whole_ragged
        ),
        "seed, loss / 4, window of 3: norm over the right one": float(too_small.norm() / whole_short.norm()),
        "Lightning, accumulate_grad_batches=4, window of 3: norm over the right one": float(
            trained(cut(short, 2), window=4).norm() / whole_short.norm()
        ),
        "ours, accumulate_grad_batches=4, window of 3: norm over the right one": float(
            trained(cut(short, 2), window=4, strategy=ours(micro_batch_size=1)).norm() / whole_short.norm()
        ),
        "ours, one batch of 6 rows, micro-batch 2: norm over the right one": float(
            trained([short], strategy=ours(micro_batch_size=2)).norm() / whole_short.norm()
        ),
        "seed 000, gradients zeroed inside the last micro-step: norm over the right one": float(
            lost.norm() / whole_even.norm()
        ),
        "seed 002, reported epoch loss over the right one": statistics.mean(scaled) / losses_even[0],
    }


def reading():
    """Microseconds of one reading of the CPU's pool, and of one garbage collection.

    The seed's monitor collects garbage before it reads.
    """

    def median(function, times):
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) * 1e6

    return {"read_microseconds": median(lambda: read("cpu"), 200), "gc_collect_microseconds": median(gc.collect, 10)}


def watermark_shares():
    """Torch's MPS watermarks as shares of RAM.

    The defaults are 1.7 (high) and 1.4 (low) of the recommended working set.

    Working sets in units of the RAM's, as printed in users' reports of several macOS versions; no Mac was read here.
    """
    reported = ((8, 5.33), (16, 10.67), (16, 11.84), (24, 16.0), (24, 17.76), (32, 21.3), (128, 107.52))
    shares = [recommended / ram for ram, recommended in reported]
    return {
        f"{name} {ratio}": [ratio * min(shares), ratio * max(shares)] for name, ratio in (("high", 1.7), ("low", 1.4))
    }


if __name__ == "__main__":
    MEASURES = (sizes, loss_rules, watermark_shares, reading, recomputation_savings, accumulation_memory)
    sys.exit(record_measures("claims.cpu", Path(__file__), MEASURES))
