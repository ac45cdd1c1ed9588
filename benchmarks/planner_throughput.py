"""How fast the chosen plan is beside the best of all plans that fit: micro-batch size by recomputation, at three budgets.

    python benchmarks/planner_throughput.py --device cuda [--output FILE]

The batch stays the same; only how it is cut, and whether blocks are recomputed, differ. First every plan is measured without a budget:
its seconds a step and what it takes. At each budget, a share of what the undivided batch takes, the best plan is the fastest of those
that fit into it; then the strategy that is left to choose and the best plan take turns in one process, and their seconds are compared.
One process at a time: it is their speed that counts.
"""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from planner.limited import FIXED, PRECISION, Limit, Pull, budget_of, levers_of, told
from planner.modules import MODULES
from planner.pool import Task, run_all
from planner.recording import Record, begin, parser
from planner.tables import gib, table
from planner.truth import fit

from lightning_unified import UnifiedStrategy
from lightning_unified.training.levers import recompute_policies

CHOSEN = {"cpu": ("mlp", "gearhead-small"), "cuda": ("gearhead-118m", "bert-like", "tied 150k vocabulary")}
BATCHES = 2  # times the larger of the module's two batch sizes
PARTS = (1, 2, 3, 4, 6, 8, 16)
SHARES = (0.35, 0.6, 0.85)
STEPS, WARM, TURNS = 8, 3, 1
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


def _timed(
    name: str,
    device: str,
    rows: int,
    strategy: UnifiedStrategy,
    *,
    levers: dict | None = None,
    limit: int | None = None,
) -> tuple[float, int | None]:
    """Return the median seconds of a step after the first ones, and what was taken on a GPU."""
    module, batch, steps = MODULES[name].build(device), MODULES[name].batch(device, rows), Steps()
    if (
        torch.cuda.is_initialized()
    ):  # the first fit makes the allocator itself, after the strategy has written its settings
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    callbacks = [steps, Limit(limit), Pull(levers)]
    fit(module, batch, device=device, precision=PRECISION[device], strategy=strategy, callbacks=callbacks, steps=STEPS)
    taken = torch.cuda.max_memory_reserved() if device == "cuda" else None
    del module
    gc.collect()
    return statistics.median(steps.seconds[WARM:]), taken


def swept(name: str, device: str, rows: int) -> dict[str, Any]:
    """Return the seconds and the bytes of every plan."""
    plans = []
    for blocks, size in itertools.product(_levels(name, device), dict.fromkeys(-(-rows // parts) for parts in PARTS)):
        levers = {"blocks": blocks, "keep_attention": False}
        plan: dict[str, Any] = {"micro_batch_size": size, "levers": levers}
        strategy = UnifiedStrategy(micro_batch_size=size, **FIXED)
        try:
            seconds, taken = _timed(name, device, rows, strategy, levers=levers)
            plan |= {"seconds": round(seconds, 5), "reserved": taken}
        except Exception as error:
            plan["error"] = f"{type(error).__name__}: {error}"[:200]
        plans.append(plan)
    return {"plans": plans}


def _levels(name: str, device: str) -> list[Any]:
    """Return how many blocks are recomputed: none, half and all, as far as the module offers it."""
    offered = [policy.blocks for policy in recompute_policies(MODULES[name].build(device))]
    counts = [blocks for blocks in offered if blocks not in (0, "all")]
    return [0, *([counts[len(counts) // 2]] if counts else []), *(["all"] if "all" in offered else [])]


def duel(name: str, device: str, rows: int, budget: int, best: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the plan that the strategy chooses and of `best`, in turns, and what was chosen."""
    seconds: dict[str, list[float]] = {"chosen": [], "best": []}
    found: dict[str, Any] = {}
    for turn in range(2 * TURNS):
        who = ("chosen", "best")[turn % 2]
        own = budget_of(device, budget)
        strategy = (
            UnifiedStrategy(budget=own, batch_norm="micro")
            if who == "chosen"
            else UnifiedStrategy(micro_batch_size=best["micro_batch_size"], **{**FIXED, "budget": own})
        )
        taken, reserved = _timed(
            name,
            device,
            rows,
            strategy,
            levers=best["levers"] if who == "best" else None,
            limit=budget if device == "cuda" else None,
        )
        seconds[who].append(taken)
        if who == "chosen":
            prediction = getattr(strategy.plan, "prediction", None)
            found = {
                "micro_batch_size": strategy.micro_batch_size,
                "levers": levers_of(strategy),
                "recoveries": strategy.recoveries,
                "reserved": reserved,
                "predicted_seconds": None if prediction is None else prediction.seconds,
            }
    chosen, other = (min(one) for one in seconds.values())
    return found | {"seconds": round(chosen, 5), "best_seconds": round(other, 5), "ratio": round(other / chosen, 4)}


class Progress:
    """Sweeps a module, then lets the chosen plan meet the best one at each budget.

    Args:
        record: Where finished rows go.
        device: `"cpu"` or `"cuda"`.
        options: `only`, `limit` and `again` of the command line.
    """

    def __init__(self, record: Record, device: str, options: Any) -> None:
        self._record, self._device, self._options = record, device, options
        self._rows: dict[str, dict[str, Any]] = {}

    def begin(self) -> list[Task]:
        names = [name for name in CHOSEN[self._device] if self._wanted(name)]
        return [
            Task(name=f"sweep: {name}", work=swept, args=(name, self._device, self._batch(name)), seconds=500)
            for name in names
        ]

    def _batch(self, name: str) -> int:
        return BATCHES * MODULES[name].size(self._device).rows[1]

    def _wanted(self, name: str) -> dict[str, float]:
        keys = {f"{self._device} | {name} | {share:.0%}": share for share in SHARES}
        return {
            key: share
            for key, share in keys.items()
            if self._options.only in key and self._record.lacks(key, again=self._options.again)
        }

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        step, _, key = task.name.partition(": ")
        if step == "duel":
            self._record.add({**self._rows[key], "chosen": result})
            return []
        return list(self._duels(key, result.get("plans", [])))

    def _duels(self, name: str, plans: list[dict[str, Any]]) -> Iterable[Task]:
        measured = [plan for plan in plans if "seconds" in plan]
        whole = max((plan["reserved"] or 0 for plan in measured), default=0)
        for key, share in self._wanted(name).items():
            budget = int(share * whole)
            row = {
                "cell": key,
                "module": name,
                "device": self._device,
                "share": share,
                "budget": budget,
                "plans": plans,
            }
            fitting = [plan for plan in measured if (plan["reserved"] or 0) <= budget]
            if not fitting:
                self._record.add({**row, "error": "no plan of the sweep fits"})
                continue
            best = min(fitting, key=lambda plan: plan["seconds"])
            self._rows[key] = {**row, "rows": self._batch(name), "best": best}
            yield Task(
                name=f"duel: {key}", work=duel, args=(name, self._device, self._batch(name), budget or 2**33, best)
            )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["chosen"]["ratio"] for row in rows if "ratio" in row.get("chosen", {})]
    return {
        "rows": len(rows),
        "least_ratio": min(ratios, default=None),
        "median_ratio": statistics.median(ratios) if ratios else None,
        "met": sum(ratio >= BAR for ratio in ratios),
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        best, chosen = row.get("best", {}), row.get("chosen", {})
        failure = chosen.get("error", row.get("error"))
        lines.append(
            (
                row["module"], gib(row["budget"]), _plan(best), _milliseconds(chosen.get("best_seconds")),
                failure or _plan(chosen), _milliseconds(chosen.get("seconds")), chosen.get("ratio"),
            )
        )  # fmt: skip
    heads = ("module", "budget, GiB", "best plan", "ms a step", "chosen plan", "ms a step", "chosen / best throughput")
    found = summarise(rows)
    return [f"{found['met']} of {found['rows']} at {BAR} of the best or above.", table(heads, lines)]


def _plan(plan: dict[str, Any]) -> str | None:
    if "micro_batch_size" not in plan:
        return None
    return f"{plan['micro_batch_size']} at once, {told(plan['levers'])}"


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.1f}"


def main() -> int:
    options = parser(__doc__, name="planner_throughput", jobs=1).parse_args()
    record, device = begin(
        options, what="seconds a step: the chosen plan, and the best of a sweep", summarise=summarise, tables=tables
    )
    progress = Progress(record, options.device, options)
    run_all(progress.begin(), jobs=options.jobs, done=progress.done, capacity=device["capacity"], start=device["start"])
    print("\n\n".join(["", *tables(list(record.rows.values()))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
