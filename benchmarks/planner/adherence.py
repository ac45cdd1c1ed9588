"""Check whether runs keep their budgets.

Six budgets, from 40 to 100 % of the undivided batch's peak, are enforced.

    python -m benchmarks.planner.adherence [--device cuda] [--jobs 12] [--output FILE]

On CUDA the allocator is held to the budget by `set_per_process_memory_fraction`, on a CPU the process by RLIMIT_AS, which counts
what planning takes too: so does the peak without a limit there. Each row: a fit by
`UnifiedStrategy(budget=…, micro_batch_size="auto")`, whether it took more, how often it recovered, and into how many micro-batches it
split the batch. Splits are even, so only the number of micro-batches is chosen. The true maximum of a micro-batch is the split into the
fewest micro-batches that fit, with the same recomputation. The search for it begins with the next fewer micro-batches, each tried in a fresh process
without recovery; if those do not fit, fewer do not either. Where the strategy refuses or dies, the smallest plan there is is tried: one
row at a time, everything recomputed.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from benchmarks.planner.harness.limited import attempt, describe_options, planned, unlimited
from benchmarks.planner.harness.pool import Task
from benchmarks.planner.harness.recording import Record, errors, measure, parser
from benchmarks.planner.harness.tables import gib, percent, table
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified.cost_model.candidates import even_splits

_LARGE = ("mlp", "gearhead-34m", "gearhead-118m", "bert-like", "encoder-decoder", "tied 150k vocabulary")
CHOSEN = {
    "cpu": {  # about 1 GiB each, of which little is weights: a process takes a few MiB that are no tensors, which must not decide
        "mlp, narrow": 30_000,
        "gearhead-small": 144,
        "bert-like": 80,
        "encoder-decoder": 64,
        "tied 150k vocabulary": 12,
        "graph scatter": 80,
    },
    "cuda": {name: 2 * MODULES[name].cuda.rows[1] for name in _LARGE},
}
"""Modules, and the rows of their batches."""

SHARES = (0.4, 0.52, 0.64, 0.76, 0.88, 1.0)
CONTEXT = 2**30
NEAR = 0.97


class FewestMicroBatches:
    """Looks for the fewest micro-batches of a batch that fit, below a number of them that does.

    Args:
        rows: Of the batch.
        chosen: Rows at once that fit.
    """

    def __init__(self, rows: int, *, chosen: int) -> None:
        self._splits = [(len(split), split[0]) for split in even_splits(rows)]
        self._fits = next(index for index, (_, size) in enumerate(self._splits) if size <= chosen)
        self._fails = -1
        self._next = self._fits - 1

    @property
    def trying(self) -> int | None:
        """Rows at once that are to be tried; None once it is found."""
        return None if self._fits - self._fails == 1 else self._splits[self._next][1]

    @property
    def found(self) -> dict[str, int]:
        num_micro_batches, size = self._splits[self._fits]
        return {"parts": num_micro_batches, "micro_batch_size": size}

    def tried(self, *, fits: bool) -> None:
        """Note the result and choose the next split.

        Fewer micro-batches come first, then the number halfway between fitting and not fitting.
        """
        if fits:
            self._fits = self._next
        else:
            self._fails = self._next
        self._next = (self._fits + self._fails) // 2


class Progress:
    """Leads each row from the free fit by the planned one to the true maximum.

    Args:
        record: Where finished rows go.
        options: Of the command line.
    """

    def __init__(self, record: Record, options: Namespace) -> None:
        self._record, self._device, self._options = record, options.device, options
        self._rows: dict[str, dict[str, Any]] = {}
        self._searches: dict[str, FewestMicroBatches] = {}

    def begin(self) -> list[Task]:
        """Return the fits without a limit of the modules that have rows to be done.

        Fits that the record holds are taken from it.
        """
        tasks: list[Task] = []
        for name in CHOSEN[self._device]:
            known = next((row["free"] for row in self._record.rows.values() if self._is_of(row, name)), None)
            if known is not None:
                tasks += self._freed(name, known)
            elif self._wanted(name):
                tasks.append(self._task("free", name, unlimited, self._rows_of(name), weight=16 * CONTEXT))
        return sorted(tasks, key=lambda task: not task.name.startswith("free"))

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        step, _, key = task.name.partition(": ")
        if step == "free":
            return self._freed(key, result)
        return self._planned(key, result) if step == "planned" else self._attempted(key, result)

    def _is_of(self, row: dict[str, Any], name: str) -> bool:
        return row["module"] == name and row.get("rows") == self._rows_of(name)

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
        return CHOSEN[self._device][name]

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
        search = self._searches[key] = FewestMicroBatches(row["rows"], chosen=size)
        result["parts"] = search.found["parts"]
        return self._look_on(key)

    def _attempted(self, key: str, result: dict[str, Any]) -> list[Task]:
        row = self._rows[key]
        if key not in self._searches:
            row["smallest"] = result
            self._record.add(row)
            return []
        if "error" in result:
            self._record.add({**row, "sweep": result})
            return []
        search = self._searches[key]
        row["tried"] = [*row.get("tried", []), {"micro_batch_size": search.trying, **result}]
        search.tried(fits=result["fits"])
        return self._look_on(key)

    def _look_on(self, key: str) -> list[Task]:
        """Try the next number of micro-batches, or note what was found."""
        row, search = self._rows[key], self._searches[key]
        if search.trying is not None:
            return [self._limited("sweep", row, attempt, search.trying, row["planned"]["memory_options"])]
        row["true_maximum"] = search.found
        self._record.add(row)
        return []


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row says about the bars.

    The ratio is that of the rows in a micro-batch, on average.
    """
    plan, smallest = row.get("planned", {}), row.get("smallest", {})
    trained, fewest = plan.get("outcome") == "trained", row.get("true_maximum", {}).get("parts")
    return {
        "trained": trained,
        "exceeded": trained and plan["reserved"] > row["budget"],
        "recovered": trained and plan["recoveries"] > 0,
        "ratio": fewest / plan["parts"] if trained and fewest else None,
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
                plan.get("parts"), row.get("true_maximum", {}).get("parts"), _ratio(found["ratio"]), describe_options(plan.get("memory_options")),
                plan.get("recoveries"),
            )
        )  # fmt: skip
    heads = (
        "module",
        "budget",
        "GiB",
        "outcome",
        "taken, GiB",
        "micro-batches",
        "fewest that fit",
        "ratio",
        "activations",
    )
    return table((*heads, "recoveries"), lines)


def main() -> int:
    options = parser(__doc__, name="adherence", jobs=12).parse_args()
    what = "budgets enforced, and what is trained inside them, bytes"
    return measure(options, what=what, summarise=summarise, tables=tables, progress=Progress)


if __name__ == "__main__":
    sys.exit(main())
