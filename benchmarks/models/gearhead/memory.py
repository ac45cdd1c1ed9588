"""Peak live bytes of gearhead-34m on a CPU, with and without recomputation.

Batch 2 x 512, fp32, AdamW.

    python -m benchmarks.models.gearhead.memory [--output benchmarks/models/gearhead/memory.json]

Counted, not sampled: every allocation and release that torch's CPU allocator reports to the profiler, from before the model is
built, added up in the order of time. "Steady state" is the second and third step, when the optimizer's states exist.
The loop is a plain one. "textbook order" zeroes the gradients before the forward pass; "Lightning's order" after it, as
Lightning does, so that the last step's gradients live through the forward pass. No data loader, no logging, no clipping.
Exit code 1 when a bar is missed.
"""

import argparse
import datetime as dt
import gc
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_unified.data.documents.error_codes import NUM_CODE_IDS, NUM_SUBSYSTEMS
from lightning_unified.models.gearhead.module import GearHead
from lightning_unified.models.training import adamw, decay_groups

ROWS, TOKENS, STEPS = 2, 512, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way of training; `bar_gb` in units of 10**9 bytes."""

    name: str
    recompute: bool = True
    optimizer: str | None = "fused"
    zero_after_forward: bool = False
    dropout: float = 0.1
    bar_gb: float | None = None


CASES = (
    Case(name="forward + backward alone", optimizer=None, bar_gb=0.35),
    Case(name="training step, textbook order", bar_gb=0.60),
    Case(name="training step, Lightning's order", zero_after_forward=True, bar_gb=0.60),
    Case(name="training step, for-each AdamW", optimizer="foreach"),
    Case(name="training step, no recomputation", recompute=False),
    Case(name="forward + backward, no recomputation", recompute=False, optimizer=None),
)


def run(case):
    """Build the model of `case` and train it for `STEPS` steps."""
    torch.manual_seed(0)
    model = GearHead(preset="gearhead-34m", recompute=case.recompute, dropout=case.dropout)
    ids = torch.randint(9, model.config.vocabulary, (ROWS, TOKENS))
    asked = torch.full_like(ids, -100)
    asked[:, 40] = torch.randint(0, NUM_SUBSYSTEMS, (ROWS,))
    codes = torch.zeros_like(ids)
    codes[:, 41:45] = torch.randint(1, NUM_CODE_IDS, (ROWS, 4))
    batch = {"input_ids": ids, "labels": ids, "error_code_ids": codes, "diagnosis_labels": asked}
    hparams = {**model.hparams, "optimizer_kernel": case.optimizer}
    groups = decay_groups(model.network.parameters(), weight_decay=hparams["weight_decay"])
    optimizer = adamw(groups, hparams=hparams) if case.optimizer else None
    for step in range(STEPS):
        with record_function(f"step {step}"):
            if not case.zero_after_forward:
                model.zero_grad()
            loss = model.training_step(batch)
            if case.zero_after_forward:
                model.zero_grad()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
    return model.config.parameters


def measure(case):
    """Return the peak of live bytes from the second step on, and what lives at its start."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        parameters = run(case)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "step 1")
    live = peak = at_start = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if event.start_ns() < start:
                at_start = live
            else:
                peak = max(peak, live)
    return {**asdict(case), "parameters": parameters, "live_at_start_bytes": at_start, "peak_bytes": peak}


def machine():
    """Return what the figures depend on."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": names[0] if names else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    print(f"{'gearhead-34m, 2 x 512, fp32, CPU':40} {'GB (10^9)':>10} {'GiB (2^30)':>11} {'bar, GB':>8}")
    rows = []
    for case in CASES:
        row = measure(case)
        row["met"] = None if case.bar_gb is None else row["peak_bytes"] <= case.bar_gb * 1e9
        rows.append(row)
        bar = "" if case.bar_gb is None else f"{case.bar_gb:.2f} {'met' if row['met'] else 'MISSED'}"
        print(f"{case.name:40} {row['peak_bytes'] / 1e9:10.4f} {row['peak_bytes'] / 2**30:11.4f} {bar:>8}", flush=True)
    result = {
        "what": "peak of live bytes in steps 2 and 3, from the profiler's memory events",
        "command": "python -m benchmarks.models.gearhead.memory",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "cases": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(row["met"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
