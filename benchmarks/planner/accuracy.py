"""Compare predicted peaks with true ones.

Cells are modules x precision x recomputation x optimizer x two batch sizes.

    python -m benchmarks.planner.accuracy [--device cuda] [--jobs 12] [--output FILE]
    python -m benchmarks.planner.accuracy --summary benchmarks/planner/records/accuracy_cuda.json

Each cell is predicted before any step by `lightning_unified.predict`, in a process of its own: by fake tensors of the CPU that are made
to behave like the device's. Beside it, in another process, the rival: torch's MemTracker under fake tensors.

The truth, in a third: a fit of four steps by `strategy="unified"`, in whole batches; on CUDA the most that was allocated and reserved from the
second step on (and over all, beside it), on a CPU the live bytes that the allocator reports to the profiler, and in two more processes
without a profiler the growth of `ru_maxrss`: with the C library as it is, and set to map blocks of 64 KiB and more one by one. A cell
that fails is a row with its error. The record is written after each cell, and a run takes up one that is there.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from benchmarks.planner.harness.cells import Cell, select
from benchmarks.planner.harness.ours import predicted
from benchmarks.planner.harness.pool import Task
from benchmarks.planner.harness.recording import Record, errors, measure, parser
from benchmarks.planner.harness.rival import WORKSPACE, tracked
from benchmarks.planner.harness.tables import errors_of, gib, percent, spread, table
from benchmarks.planner.harness.truth import grown, true_peak

GIB = 2**30
CONTEXT = GIB  # what a process takes of a GPU beside its tensors
UNKNOWN = 12 * GIB  # what a cell is taken to need that could not be predicted
BARS = {
    "cuda": {
        "transformers": {"median_absolute": 0.003, "p95_absolute": 0.01},
        "all": {"median_absolute": 0.005, "p95_absolute": 0.005, "worst_absolute": 0.02, "under_by_1_percent": 0.01},
    },
    "cpu": {"transformers": {"p95_absolute": 0.02}, "all": {"p95_absolute": 0.07}},
}
RESERVED_BAR = {"cuda": 0.03}
THRESHOLD = 64 * 2**10  # of blocks that are mapped one by one, where the C library is set so
RESIDENT_SHARE, RESIDENT_BAR = 1.05, 48.0  # of what lives, and MB above it, with that threshold
SECONDS_BAR = 10.0
_RESIDENT = "resident with the threshold, MB above"
SAYERS = ("planner", "MemTracker", "MemTracker + workspace")


class Progress:
    """Puts a cell's parts together as they come in.

    Args:
        record: Where finished rows go.
        options: Of the command line.
    """

    def __init__(self, record: Record, options: Namespace) -> None:
        self._record, self._options, self._device = record, options, options.device
        self._rows: dict[str, dict[str, Any]] = {}
        self._cells: dict[str, Cell] = {}
        others = {"process", "threshold"} if self._device == "cpu" else set()
        self._parts = ({"predicted", "rival", "truth"} | others).difference(options.skip)

    def begin(self) -> list[Task]:
        cells = [cell for cell in select(self._device) if self._options.only in cell.key][: self._options.limit]
        lacking = [cell for cell in cells if self._record.lacks(cell.key, again=self._options.again)]
        return [task for cell in lacking for task in self._before_truth(cell)]

    def _before_truth(self, cell: Cell) -> list[Task]:
        """Return what can be done before the truth, whose weight is not known yet."""
        self._cells[cell.key] = cell
        kind = cell.kind
        self._rows[cell.key] = {**cell.to_dict(), "is_transformer": kind.is_transformer}
        work = {"predicted": predicted, "rival": tracked}
        return [self._task(cell, part, call) for part, call in work.items() if part in self._parts]

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        """Keep a part; return what comes next, and finish the row when all are there."""
        part, _, key = task.name.partition(": ")
        row, cell = self._rows[key], self._cells[key]
        row[part] = result
        if self._parts <= row.keys():
            self._record.add(row)
        if part != "predicted":
            return []
        weight = int(1.1 * (result.get("reserved") or UNKNOWN)) + CONTEXT
        next_tasks = [self._task(cell, "truth", true_peak(self._device), weight=weight)]
        resident = {"process": (grown,), "threshold": (grown, THRESHOLD)}
        next_tasks += [self._task(cell, part, *call) for part, call in resident.items() if part in self._parts]
        return next_tasks

    @staticmethod
    def _task(cell: Cell, part: str, work: Any, *args: Any, weight: int = CONTEXT) -> Task:
        return Task(name=f"{part}: {cell.key}", work=work, args=(cell, *args), weight=weight, seconds=150)


def said(row: dict[str, Any], who: str) -> float | None:
    """Return the peak that `who` said.

    The result is None where it said nothing, or that it is not to be trusted.
    """
    part = row.get("predicted" if who == "planner" else "rival", {})
    if part.get("confidence") == "low" or "allocated" not in part:
        return None
    workspace = WORKSPACE if who.endswith("workspace") and row["device"] == "cuda" else 0
    return part["allocated"] + workspace


def true(row: dict[str, Any]) -> float | None:
    return row.get("truth", {}).get("allocated")


def reserved_error(rows: list[dict[str, Any]]) -> list[float]:
    """Return the errors of what the allocator, or the process, takes in all."""
    part = "truth" if rows and rows[0]["device"] == "cuda" else "process"
    trusted = [row for row in rows if said(row, "planner") is not None]
    return errors_of(
        trusted, lambda row: row["predicted"].get("reserved"), lambda row: row.get(part, {}).get("reserved")
    )


def above_live(rows: list[dict[str, Any]]) -> list[float]:
    """Return the MB by which each process with the threshold outgrew its share.

    The share is of the most bytes that live at once.
    """
    pairs = [(row.get("threshold", {}).get("reserved"), true(row)) for row in rows]
    return [(taken - RESIDENT_SHARE * live) / 1e6 for taken, live in pairs if taken and live]


def groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds = {True: "transformers", False: "others"}
    return {"all": rows} | {
        name: [row for row in rows if row["is_transformer"] == kind] for kind, name in kinds.items()
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures by group and by who said them, and which bars are met."""
    figures = {
        name: {who: {"cells": len(found), **spread(found)} for who in _sayers(rows) if (found := _errors(group, who))}
        | {"reserved": spread(reserved_error(group))}
        for name, group in groups(rows).items()
    }
    return {
        "cells": len(rows),
        "cells_with_errors": sum(bool(errors(row)) for row in rows),
        "low_confidence": sum(row.get("predicted", {}).get("confidence") == "low" for row in rows),
        "peaks_above_4_gib": len({row["module"] for row in rows if (true(row) or 0) > 4 * GIB}),
        "figures": figures,
        "bars": bars(rows, figures),
    }


def _sayers(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return whose figures there are; workspaces are of CUDA."""
    return SAYERS if rows and rows[0]["device"] == "cuda" else SAYERS[:2]


def _errors(rows: list[dict[str, Any]], who: str) -> list[float]:
    return errors_of(rows, lambda row: said(row, who), true)


def bars(rows: list[dict[str, Any]], figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each bar with what was found; met is None where nothing was."""
    if not rows:
        return []
    device = rows[0]["device"]
    found = [
        (f"{group}: {name.replace('_', ' ')}", figures[group].get("planner", {}).get(name), bar)
        for group, wanted in BARS[device].items()
        for name, bar in wanted.items()
    ]
    if device in RESERVED_BAR:
        found.append(("reserved: p95 absolute", figures["all"]["reserved"]["p95_absolute"], RESERVED_BAR[device]))
    if device == "cpu":
        found.append((f"{_RESIDENT} {RESIDENT_SHARE} of live", max(above_live(rows), default=None), RESIDENT_BAR))
    seconds = [row["predicted"]["seconds"] for row in rows if "seconds" in row.get("predicted", {})]
    found.append(("seconds to plan, longest", max(seconds, default=None), SECONDS_BAR))
    return [
        {"bar": name, "wanted": bar, "found": value, "met": None if value is None else value <= bar}
        for name, value, bar in found
    ]


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return the summary, the modules, the time to plan, and what failed, as Markdown."""
    summary = summarise(rows)
    head = (
        f"{summary['cells']} cells, {summary['peaks_above_4_gib']} modules with a peak above 4 GiB, {summary['low_confidence']} cells of "
        f"low confidence (not in the errors below), {summary['cells_with_errors']} with an error."
    )
    overall = table(
        ("who", "cells of", "cells", "median error", "median size", "p95 size", "worst", "too low", "too low by > 1 %"),
        [
            (who, name, *_figures(group[who]))
            for name, group in summary["figures"].items()
            for who in SAYERS
            if who in group
        ],
    )
    wanted = table(
        ("bar", "wanted", "found", "met"),
        [(bar["bar"], *_bar(bar), {True: "yes", False: "no", None: None}[bar["met"]]) for bar in summary["bars"]],
    )
    failed = table(
        ("cell", "part", "error"),
        [
            (row["cell"].replace("|", "/"), part, text.replace("|", "/"))
            for row in rows
            for part, text in errors(row).items()
        ],
    )
    return [head, overall, wanted, by_module(rows), by_parameters(rows), failed]


def _figures(figures: dict[str, Any]) -> list[Any]:
    signed = {"median", "worst"}
    return [figures["cells"]] + [
        percent(value, signed=name in signed)
        for name, value in figures.items()
        if name not in ("cells", "worst_absolute")
    ]


def _bar(bar: dict[str, Any]) -> tuple[str, str]:
    if bar["bar"].startswith("seconds"):
        return f"{bar['wanted']:.0f} s", "–" if bar["found"] is None else f"{bar['found']:.1f} s"
    if bar["bar"].startswith(_RESIDENT):
        return f"≤ {bar['wanted']:.0f} MB", "–" if bar["found"] is None else f"{bar['found']:.1f} MB"
    return f"≤ {percent(bar['wanted'])}", percent(bar["found"])


def by_module(rows: list[dict[str, Any]]) -> str:
    """Return a row a module: its peaks, and the errors of the planner and of its rival."""
    lines = []
    for name in dict.fromkeys(row["module"] for row in rows):
        own = [row for row in rows if row["module"] == name]
        peaks = [peak for row in own if (peak := true(row))]
        ours, rival = spread(_errors(own, SAYERS[0])), spread(_errors(own, _sayers(rows)[-1]))
        held = spread(reserved_error(own))
        lines.append(
            (
                name,
                len(own),
                f"{gib(min(peaks))} … {gib(max(peaks))}" if peaks else None,
                percent(ours["median"], signed=True),
                percent(ours["worst"], signed=True),
                percent(held["median"], signed=True),
                percent(held["worst"], signed=True),
                percent(rival["median"], signed=True),
                percent(rival["worst"], signed=True),
            )
        )
    heads = ("module", "cells", "true peak, GiB", "error, median", "worst", "reserved, median", "worst")
    return table((*heads, f"{_sayers(rows)[-1]}, median", "worst"), lines)


def by_parameters(rows: list[dict[str, Any]]) -> str:
    """Return the seconds a prediction takes, by the module's number of parameters."""
    limits = {"below 1 M": 1e6, "1 to 10 M": 1e7, "10 to 100 M": 1e8, "100 M to 1 B": 1e9, "above": float("inf")}
    lines, least = [], 0.0
    for name, most in limits.items():
        own = [
            row
            for row in rows
            if "seconds" in row.get("predicted", {}) and least <= row["predicted"]["parameters"] < most
        ]
        least = most
        if own:
            columns = [
                [row[part]["seconds"] for row in own if "seconds" in row.get(part, {})]
                for part in ("predicted", "rival")
            ]
            lines.append(
                (name, len(own), *[f"{sum(one) / len(one):.1f} … {max(one):.1f}" if one else None for one in columns])
            )
    return table(("parameters", "cells", "seconds to plan, mean … most", "MemTracker, mean … most"), lines)


def main() -> int:
    arguments = parser(__doc__, name="accuracy", jobs=12)
    arguments.add_argument(
        "--skip", nargs="*", default=(), choices=("rival", "process", "threshold"), help="parts to leave out"
    )
    options = arguments.parse_args()
    what = "predicted against true peaks of memory, bytes"
    return measure(options, what=what, summarise=summarise, tables=tables, progress=Progress)


if __name__ == "__main__":
    sys.exit(main())
