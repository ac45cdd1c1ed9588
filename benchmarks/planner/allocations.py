"""Compare each allocation of a step on a GPU with the planner's prediction.

    python -m benchmarks.planner.allocations [--only TEXT] [--jobs 14] [--output FILE]

Each cell is predicted in one process and trained in another, which notes every allocation of its third step. For each cell the
program prints predicted and true peaks, and the large allocations that only one side has, each behind the last operation that
both have. With `--output` it writes all allocations as compressed JSON.
"""

import argparse
import difflib
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.planner.harness.cells import Cell
from benchmarks.planner.harness.ours import uninitialised
from benchmarks.planner.harness.pool import Task, run_all
from benchmarks.planner.harness.recording import begin
from benchmarks.planner.harness.truth import on_gpu
from benchmarks.planner.zoo.modules import available
from benchmarks.planner.zoo.unseen import UNSEEN
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.trace.trace import Give, Take, Work
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.step_traces import StepTraces

_PRECISIONS = ("32-true", "bf16-mixed")
_LARGE = 2**20
_ALIGNMENT = 512
_MOST_EVENTS = 400_000
_SHOWN = 12
_RECORDED_STEP = 2
_KEPT_EVERY = 10


def expected(cell: Cell) -> dict[str, Any]:
    """Return the predicted peaks and the allocations of a step: what takes or gives which bytes."""
    with uninitialised():
        module = cell.kind.build(cell.device, optimizer=cell.optimizer)
    batch = cell.kind.batch(cell.device, cell.rows)
    step = StepSpec(module=module, batch=batch, backend=cell.device, precision=cell.precision)
    trace, _ = StepTraces(step).exactly(Combination(precision=cell.precision, recompute=None), None)
    peak = allocator_peak(trace)
    sizes: dict[int, int] = {}
    events: list[tuple[int, str]] = []
    work = Work(op="", phase="setup")
    for event in trace.events:
        if isinstance(event, Work):
            work = event
        elif isinstance(event, Take):
            sizes[event.storage] = _rounded(event.bytes)
            if work.phase != "setup":
                events.append((sizes[event.storage], f"{work.phase} {work.place} {work.op} [{event.category}]"))
        elif isinstance(event, Give) and work.phase != "setup":
            events.append((-sizes.get(event.storage, 0), f"{work.phase} {work.place} {work.op}"))
    return {"allocated": peak.allocated, "reserved": peak.reserved, "confidence": trace.confidence, "events": events}


class _History(L.Callback):
    """Notes the allocations of one step."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _RECORDED_STEP:
            torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_EVENTS)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _RECORDED_STEP:
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            signs = {"alloc": 1, "free_requested": -1}
            self.events = [
                (signs[one["action"]] * _rounded(one["size"]), "") for one in entries if one["action"] in signs
            ]
            torch.cuda.memory._record_memory_history(enabled=None)


def found(cell: Cell) -> dict[str, Any]:
    """Return the true peaks and the allocations of the third step."""
    history = _History()
    return {**on_gpu(cell, [history]), "events": history.events}


def _rounded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def compared(predicted: dict[str, Any], true: dict[str, Any]) -> list[str]:
    """Return the large allocations that only one side has, in words, the most bytes first."""
    ours, theirs = ([one for one in side["events"] if one[0] >= _LARGE] for side in (predicted, true))
    matcher = difflib.SequenceMatcher(None, [size for size, _ in ours], [size for size, _ in theirs], autojunk=False)
    lines: dict[str, list[int]] = defaultdict(list)
    for how, first, last, begins, ends in matcher.get_opcodes():
        if how == "equal":
            continue
        for _, words in ours[first:last]:
            lines[f"only predicted: {words}"].append(0)
        for size, words in ours[first:last]:
            lines[f"only predicted: {words}"][-1] += size
        after = ours[first - 1][1] if first else "the start"
        for size, _ in theirs[begins:ends]:
            lines[f"only true, after {after}"].append(size)
    ordered = sorted(lines.items(), key=lambda one: -sum(one[1]))[:_SHOWN]
    return [f"    {sum(sizes) / 2**20:9.1f} MiB in {len(sizes)}: {words}" for words, sizes in ordered]


def _cells(options: argparse.Namespace) -> Iterable[Cell]:
    names = [kind.name for kind in UNSEEN] if not options.all else list(available())
    for name in names:
        if name in available() and options.only in name:
            for precision in _PRECISIONS:
                rows = available()[name].cuda.rows[options.rows]
                yield Cell(
                    module=name, device="cuda", precision=precision, recompute=False, optimizer="adamw fused", rows=rows
                )


def _line(cell: Cell, predicted: dict[str, Any], true: dict[str, Any]) -> str:
    head = f"{cell.module:26s} {cell.precision:10s}"
    wrong = [f"{part}: {side['error']}" for part, side in (("predicted", predicted), ("true", true)) if "error" in side]
    if wrong:
        return f"{head} {' / '.join(wrong)}"
    figures = [
        f"{kind} {predicted[kind] / 2**20:9.1f} of {true[kind] / 2**20:9.1f} MiB {100 * (predicted[kind] / true[kind] - 1):+7.2f} %"
        for kind in ("allocated", "reserved")
    ]
    return f"{head} {'; '.join(figures)} {predicted['confidence']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="modules whose name has this text in it")
    parser.add_argument("--all", action="store_true", help="all modules, not those of unseen kinds only")
    parser.add_argument("--rows", type=int, choices=(0, 1), default=1, help="which of a module's two batch sizes")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--output", type=Path, help="all allocations, as compressed JSON")
    parser.set_defaults(device="cuda", name="allocations")
    options = parser.parse_args()
    _, start, capacity = begin(options)
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    cells = {cell.key: cell for cell in _cells(options)}

    def keep() -> None:
        if options.output is not None:
            options.output.write_bytes(gzip.compress(json.dumps(parts).encode()))

    def done(task: Task, result: dict[str, Any]) -> None:
        part, _, key = task.name.partition(": ")
        parts[key][part] = result
        if len(parts[key]) == 2:
            predicted, true = parts[key]["predicted"], parts[key]["true"]
            lines = [] if "error" in predicted or "error" in true else compared(predicted, true)
            print("\n".join([_line(cells[key], predicted, true), *lines]), flush=True)
            if sum(len(each) == 2 for each in parts.values()) % _KEPT_EVERY == 0:
                keep()

    works = (("predicted", expected), ("true", found))
    tasks = [
        Task(
            name=f"{part}: {key}", work=work, args=(cell,), weight=12 * 2**30 if part == "true" else 2**30, seconds=100
        )
        for key, cell in cells.items()
        for part, work in works
    ]
    run_all(tasks, jobs=options.jobs, done=done, capacity=capacity, start=start)
    keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
