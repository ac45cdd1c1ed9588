"""Whether a run that is given a budget keeps it: six budgets, from 40 to 100 % of what the undivided batch takes, each enforced.

    python benchmarks/planner_adherence.py [--device cuda] [--jobs 12] [--output FILE]

On CUDA the allocator is held to the budget by `set_per_process_memory_fraction`, on a CPU the process by RLIMIT_AS. Each row: a fit by
`UnifiedStrategy(budget=…, micro_batch_size="auto")`, whether it took more, how often it recovered, and which micro-batch it chose. The
true maximum beside it, with the same recomputation, is looked for by bisection, each size tried in a fresh process without recovery,
until it is found or known to be so near that the ratio meets its bar. Where the strategy refuses or dies, the smallest plan there is is
tried: one row at a time, everything recomputed.
"""

import sys
from collections.abc import Iterable
from typing import Any

from planner.limited import attempt, planned, told, unlimited
from planner.modules import MODULES
from planner.pool import Task, run_all
from planner.recording import Record, begin, errors, parser
from planner.tables import gib, percent, table

CHOSEN = {
    "cpu": ("mlp", "gearhead-small", "bert-like", "encoder-decoder"),
    "cuda": ("mlp", "gearhead-34m", "gearhead-118m", "bert-like", "encoder-decoder", "tied 150k vocabulary"),
}
BATCHES = {"cpu": 4, "cuda": 2}  # times the larger of the module's two batch sizes
SHARES = (0.4, 0.52, 0.64, 0.76, 0.88, 1.0)
CONTEXT = 2**30
NEAR = 0.97


class Progress:
    """Leads each row from the free fit by the planned one to the true maximum.

    Args:
        record: Where finished rows go.
        device: `"cpu"` or `"cuda"`.
        options: `only`, `limit` and `again` of the command line.
    """

    def __init__(self, record: Record, device: str, options: Any) -> None:
        self._record, self._device, self._options = record, device, options
        self._rows: dict[str, dict[str, Any]] = {}
        self._bounds: dict[str, tuple[int, int]] = {}

    def begin(self) -> list[Task]:
        """Return the fits without a limit, of the modules that have rows to be done."""
        names = [name for name in CHOSEN[self._device] if self._wanted(name)]
        return [self._task("free", name, unlimited, self._rows_of(name), weight=16 * CONTEXT) for name in names]

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        step, _, key = task.name.partition(": ")
        if step == "free":
            return self._freed(key, result)
        return self._planned(key, result) if step == "planned" else self._attempted(key, result)

    def _wanted(self, name: str) -> list[float]:
        keys = {share: self._key(name, share) for share in SHARES}
        return [
            share
            for share, key in keys.items()
            if self._options.only in key and self._record.lacks(key, again=self._options.again)
        ][: self._options.limit]

    def _key(self, name: str, share: float) -> str:
        return f"{self._device} | {name} | {share:.0%}"

    def _rows_of(self, name: str) -> int:
        return BATCHES[self._device] * MODULES[name].size(self._device).rows[1]

    def _freed(self, name: str, result: dict[str, Any]) -> list[Task]:
        tasks = []
        for share in self._wanted(name):
            row = {"cell": self._key(name, share), "module": name, "device": self._device, "share": share}
            if "error" in result:
                self._record.add({**row, "free": result})
                continue
            row |= {"rows": self._rows_of(name), "free": result, "budget": int(share * result["reserved"])}
            self._rows[row["cell"]] = row
            tasks.append(self._limited("planned", row, planned))
        return tasks

    def _limited(self, step: str, row: dict[str, Any], work: Any, *args: Any) -> Task:
        weight = row["budget"] + CONTEXT
        return self._task(step, row["cell"], work, row["rows"], *args, row["budget"], weight=weight)

    def _task(self, step: str, key: str, work: Any, *args: Any, weight: int) -> Task:
        name = self._rows[key]["module"] if key in self._rows else key
        return Task(name=f"{step}: {key}", work=work, args=(name, self._device, *args), weight=weight, seconds=120)

    def _planned(self, key: str, result: dict[str, Any]) -> list[Task]:
        row = self._rows[key]
        row["planned"] = result
        size = result.get("micro_batch_size")
        if size is None:
            smallest = {"blocks": "all" if MODULES[row["module"]].has_blocks else 0, "keep_attention": False}
            return [self._limited("smallest", row, attempt, 1, smallest)]
        self._bounds[key] = (size, row["rows"] + 1)
        return self._look_on(key, min(row["rows"], int(size / NEAR) + 1))

    def _attempted(self, key: str, result: dict[str, Any]) -> list[Task]:
        row = self._rows[key]
        if key not in self._bounds:
            row["smallest"] = result
            self._record.add(row)
            return []
        if "error" in result:
            self._record.add({**row, "sweep": result})
            return []
        low, high = self._bounds[key]
        size = row.pop("trying")
        low, high = (max(low, size), high) if result["fits"] else (low, min(high, size))
        self._bounds[key] = low, high
        return self._look_on(key, (low + high) // 2)

    def _look_on(self, key: str, size: int) -> list[Task]:
        """Try `size` next, unless what is known of the maximum suffices: it is at least `low` and below `high`."""
        row, (low, high) = self._rows[key], self._bounds[key]
        if low < high - 1 and row["planned"]["micro_batch_size"] < NEAR * (high - 1):
            row["trying"] = size
            return [self._limited("sweep", row, attempt, size, row["planned"]["levers"])]
        row["true_maximum"] = {"least": low, "most": high - 1}
        self._record.add(row)
        return []


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says about the bars."""
    plan, smallest = row.get("planned", {}), row.get("smallest", {})
    trained, most = plan.get("outcome") == "trained", row.get("true_maximum", {}).get("most")
    return {
        "trained": trained,
        "exceeded": trained and plan["reserved"] > row["budget"],
        "recovered": trained and plan["recoveries"] > 0,
        "ratio": plan["micro_batch_size"] / most if trained and most else None,
        "failed": not trained and (smallest.get("fits", False) or plan.get("outcome") != "refused"),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = [verdict(row) for row in rows]
    ratios = [one["ratio"] for one in verdicts if one["ratio"] is not None]
    trained = sum(one["trained"] for one in verdicts)
    return {
        "rows": len(rows),
        "trained": trained,
        "exceeded": sum(one["exceeded"] for one in verdicts),
        "without_recovery": (trained - sum(one["recovered"] for one in verdicts)) / trained if trained else None,
        "least_ratio": min(ratios, default=None),
        "ratios_of_0_97": sum(one >= NEAR for one in ratios) / len(ratios) if ratios else None,
        "refused": sum(row.get("planned", {}).get("outcome") == "refused" for row in rows),
        "failed_though_a_plan_fits": sum(one["failed"] for one in verdicts),
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    summary = summarise(rows)
    overall = table(
        ("bar", "wanted", "found"),
        [
            ("runs that took more than their budget", 0, summary["exceeded"]),
            ("runs without a recovery", "≥ 95 %", percent(summary["without_recovery"])),
            ("least of chosen over true maximum", f"≥ {NEAR}", _ratio(summary["least_ratio"])),
            ("refused or died though a plan fits", 0, summary["failed_though_a_plan_fits"]),
        ],
    )
    return [
        f"{summary['rows']} rows, {summary['trained']} trained, {summary['refused']} refused.",
        overall,
        _by_row(rows),
    ]


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _between(maximum: dict[str, int] | None) -> str | None:
    if maximum is None:
        return None
    return str(maximum["least"]) if maximum["least"] == maximum["most"] else f"{maximum['least']} … {maximum['most']}"


def _by_row(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        plan, found = row.get("planned", {}), verdict(row)
        failure = "; ".join(errors(row).values()) or None
        outcome = plan.get("outcome", failure)
        if found["failed"]:
            outcome = f"{outcome}, though a plan fits" if row.get("smallest", {}).get("fits") else outcome
        lines.append(
            (
                row["module"], f"{row['share']:.0%}", gib(row.get("budget")), outcome, gib(plan.get("reserved")),
                plan.get("micro_batch_size"), _between(row.get("true_maximum")), _ratio(found["ratio"]), told(plan.get("levers")),
                plan.get("recoveries"),
            )
        )  # fmt: skip
    heads = ("module", "budget", "GiB", "outcome", "taken, GiB", "micro-batch", "true maximum", "ratio", "activations")
    return table((*heads, "recoveries"), lines)


def main() -> int:
    options = parser(__doc__, name="planner_adherence", jobs=12).parse_args()
    record, device = begin(
        options, what="budgets enforced, and what is trained inside them, bytes", summarise=summarise, tables=tables
    )
    progress = Progress(record, options.device, options)
    run_all(progress.begin(), jobs=options.jobs, done=progress.done, capacity=device["capacity"], start=device["start"])
    print("\n\n".join(["", *tables(list(record.rows.values()))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
