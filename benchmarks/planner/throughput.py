"""Compare the chosen plan's speed with the best of all plans that fit.

Plans are micro-batch size by recomputation, at two budgets.

    python -m benchmarks.planner.throughput --device cuda [--output FILE]

The batch stays the same; only its split, and whether blocks are recomputed, differ. First every plan is measured without a budget:
its seconds a step and what it takes. At each budget, a share of what the undivided batch takes, the best plan is the fastest that goes
through with the budget enforced; it and the strategy that is left to choose run in one process, and their seconds are compared. One
process at a time: it is their speed that counts.
"""

import copy
import gc
import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch

from benchmarks.planner.harness.limited import (
    FIXED,
    PRECISION,
    Limit,
    Pull,
    budget_of,
    describe_options,
    memory_options_of,
)
from benchmarks.planner.harness.pool import Task
from benchmarks.planner.harness.recording import Record, measure, parser
from benchmarks.planner.harness.tables import gib, table
from benchmarks.planner.harness.truth import fit
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified import UnifiedStrategy
from lightning_unified.options import recompute_policies

CHOSEN = {"cpu": ("mlp", "gearhead-small"), "cuda": ("gearhead-118m", "bert-like", "tied 150k vocabulary")}
BATCHES = 2  # times the larger of the module's two batch sizes
NUM_MICRO_BATCHES = (1, 2, 3, 4, 6, 8)
SHARES = (0.4, 0.7)
STEPS, WARM = 6, 2
BAR = 0.95


class Steps(L.Callback):
    """The seconds of each step, the device waited for at its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._end = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._end = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._end)


class Bench:
    """A module and a batch, built once, on which one plan after another is timed.

    Args:
        name: Of the module.
        device: `"cpu"` or `"cuda"`.
        rows: Of the batch.
    """

    def __init__(self, name: str, device: str, rows: int) -> None:
        self.device = device
        self._module, self._batch = MODULES[name].build(device), MODULES[name].batch(device, rows)

    def time(
        self, strategy: UnifiedStrategy, *, memory_options: dict[str, Any] | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Return the median seconds of a step after the first ones, and what was taken on a GPU."""
        gc.collect()
        if (
            torch.cuda.is_initialized()
        ):  # else the first fit makes the allocator, after the strategy has written its settings
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        steps = Steps()
        fit(
            copy.deepcopy(self._module),
            self._batch,
            device=self.device,
            precision=PRECISION[self.device],
            strategy=strategy,
            callbacks=[steps, Limit(limit), Pull(memory_options)],
            steps=STEPS,
        )
        of_gpu = self.device == "cuda"
        return {
            "seconds": round(statistics.median(steps.seconds[WARM:]), 5),
            "allocated": torch.cuda.max_memory_allocated() if of_gpu else None,
            "reserved": torch.cuda.max_memory_reserved() if of_gpu else None,
        }

    def time_fixed(
        self, plan: dict[str, Any], *, budget: str | int = "90%", limit: int | None = None
    ) -> dict[str, Any]:
        """Return the same of a plan that is given, or the error that it ends with."""
        strategy = UnifiedStrategy(micro_batch_size=plan["micro_batch_size"], **{**FIXED, "budget": budget})
        try:
            return self.time(strategy, memory_options=plan["memory_options"], limit=limit)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:200]}

    def levels(self) -> list[Any]:
        """Return how many blocks are recomputed: none, half and all, as far as the module offers it."""
        offered = [policy.blocks for policy in recompute_policies(self._module)]
        counts = [blocks for blocks in offered if blocks not in (0, "all")]
        return [0, *([counts[len(counts) // 2]] if counts else []), *(["all"] if "all" in offered else [])]


def swept(name: str, device: str, rows: int) -> dict[str, Any]:
    """Return the seconds and the bytes of every plan."""
    bench, plans = Bench(name, device, rows), []
    sizes = dict.fromkeys(-(-rows // num_micro_batches) for num_micro_batches in NUM_MICRO_BATCHES)
    for blocks, size in itertools.product(bench.levels(), sizes):
        plan = {"micro_batch_size": size, "memory_options": {"blocks": blocks, "keep_attention": False}}
        plans.append(plan | bench.time_fixed(plan))
    return {"plans": plans}


def duel(name: str, device: str, rows: int, budget: int | None, contenders: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the strategy's plan and of the first contender that runs.

    Args:
        name: Of the module.
        device: `"cpu"` or `"cuda"`.
        rows: Of the batch.
        budget: Bytes, enforced on a GPU; None gives plenty.
        contenders: Plans, the fastest first.
    """
    bench = Bench(name, device, rows)
    limit = budget if device == "cuda" else None
    own = budget_of(device, budget or 2**33)
    strategy = UnifiedStrategy(budget=own, batch_norm="micro")
    chosen = bench.time(strategy, limit=limit)
    prediction = getattr(strategy.plan, "prediction", None)
    chosen |= {
        "micro_batch_size": strategy.micro_batch_size,
        "memory_options": memory_options_of(strategy),
        "recoveries": strategy.recoveries,
        "predicted_seconds": None if prediction is None else prediction.seconds,
    }
    del strategy  # and all that it holds
    for plan in contenders:
        best = bench.time_fixed(plan, budget=own, limit=limit)
        if "seconds" in best:
            return {"chosen": chosen, "best": {**plan, **best}, "ratio": round(best["seconds"] / chosen["seconds"], 4)}
    return {"chosen": chosen, "error": "no plan of the sweep fits"}


class Progress:
    """Sweeps a module, then lets the chosen plan meet the best one at each budget.

    Sweeps are rows of the record too.

    Args:
        record: Where finished rows go.
        options: Of the command line.
    """

    def __init__(self, record: Record, options: Namespace) -> None:
        self._record, self._device, self._options = record, options.device, options
        self._rows: dict[str, dict[str, Any]] = {}

    def begin(self) -> list[Task]:
        tasks: list[Task] = []
        for name in CHOSEN[self._device]:
            sweep = self._record.rows.get(self._key(name, "sweep"))
            if sweep is not None and "plans" in sweep:
                tasks += self._duels(name, sweep["plans"])
            elif self._wanted(name):
                args = (name, self._device, self._batch(name))
                tasks.append(Task(name=f"sweep: {name}", work=swept, args=args, seconds=300))
        return tasks

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        step, _, key = task.name.partition(": ")
        if step == "duel":
            self._record.add({**self._rows[key], **result})
            return []
        self._record.add({"cell": self._key(key, "sweep"), "module": key, "device": self._device, **result})
        return self._duels(key, result.get("plans", []))

    def _key(self, name: str, what: str) -> str:
        return f"{self._device} | {name} | {what}"

    def _batch(self, name: str) -> int:
        return BATCHES * MODULES[name].size(self._device).rows[1]

    def _wanted(self, name: str) -> dict[str, float]:
        keys = {self._key(name, f"{share:.0%}"): share for share in SHARES}
        lacking = [
            key for key in keys if self._options.only in key and self._record.lacks(key, again=self._options.again)
        ]
        return {key: keys[key] for key in lacking[: self._options.limit]}

    def _duels(self, name: str, plans: list[dict[str, Any]]) -> list[Task]:
        measured = sorted((plan for plan in plans if "seconds" in plan), key=lambda plan: plan["seconds"])
        whole = max((plan["reserved"] or 0 for plan in measured), default=0)
        tasks = []
        for key, share in self._wanted(name).items():
            budget = int(share * whole)
            self._rows[key] = {"cell": key, "module": name, "device": self._device, "share": share, "budget": budget}
            contenders = [plan for plan in measured if (plan["allocated"] or 0) <= budget]
            args = (name, self._device, self._batch(name), budget or None, contenders)
            tasks.append(Task(name=f"duel: {key}", work=duel, args=args))
        return tasks


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    duels = [row for row in rows if "share" in row]
    ratios = [row["ratio"] for row in duels if "ratio" in row]
    return {
        "rows": len(duels),
        "least_ratio": min(ratios, default=None),
        "median_ratio": statistics.median(ratios) if ratios else None,
        "met": sum(ratio >= BAR for ratio in ratios),
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "share" not in row:
            continue
        best, chosen = row.get("best", {}), row.get("chosen", {})
        lines.append(
            (
                row["module"], gib(row["budget"]), _plan(best), _milliseconds(best.get("seconds")),
                row.get("error") or _plan(chosen), _milliseconds(chosen.get("seconds")), row.get("ratio"),
            )
        )  # fmt: skip
    heads = ("module", "budget, GiB", "best plan", "ms a step", "chosen plan", "ms a step", "chosen / best throughput")
    found = summarise(rows)
    return [f"{found['met']} of {found['rows']} at {BAR} of the best or above.", table(heads, lines)]


def _plan(plan: dict[str, Any]) -> str | None:
    if "micro_batch_size" not in plan:
        return None
    return f"{plan['micro_batch_size']} at once, {describe_options(plan['memory_options'])}"


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.1f}"


def main() -> int:
    options = parser(__doc__, name="throughput", jobs=1).parse_args()
    what = "seconds a step: the chosen plan, and the best of a sweep"
    return measure(options, what=what, summarise=summarise, tables=tables, progress=Progress)


if __name__ == "__main__":
    sys.exit(main())
