"""Measure how small runs give way to a memory hog on a machine with one small pool.

Recorded are the seconds until a run gives way, and whether it learns the same.

    python -m benchmarks.recovery.pressure_campaign [--runs 24] [--seed 0] [--jobs 1] [--every-s 1.0] [--batches 120] [--output FILE]

The machine is made of real processes and real limits (recovery/campaign/machine.py). Linux only.
"""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}  # before torch and numpy: a fork must have no threads, and autograd starts one for every GPU

import argparse
import ctypes
import json
import random
import shutil
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks import records
from benchmarks.recovery.campaign.comparing import difference, other_state
from benchmarks.recovery.campaign.machine import MIB, Guard, Hog, Machine
from benchmarks.recovery.campaign.processes import Ended, in_process
from benchmarks.recovery.campaign.recipes import Recipe, draw_recipe
from benchmarks.recovery.campaign.training import FINAL, STARTED, Fit, read_ledger, train

RESULTS = Path(__file__).with_suffix(".json")
TIMEOUT = 120.0
PACE = 0.02  # seconds between two batches, so that a fast machine has not ended before the hog begins
ENDS = ("went on", "stopped, then resumed", "killed, then resumed")
LARGEST = 1e-4  # of the relative difference to batches that run whole: float32 sums in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run.

    Attributes:
        index: With the campaign's seed, decides everything.
        recipe: What is trained.
        spare: Bytes of the pool beyond what the run needs when it is alone.
        hog: Who else needs memory.
        stop: Whether the guard may end the run.
        keeps: Whether the allocator keeps what is freed, as those of accelerators do, until caches are cleared.
    """

    index: int
    recipe: Recipe
    spare: int
    hog: Hog
    stop: bool
    keeps: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one run.

    Attributes:
        index: The case's number.
        what: The case, in short.
        ended: "went on"; "stopped, then resumed": by the guard, with its state saved; "killed, then resumed": it touched memory that the
            hog had taken meanwhile, and went on from its newest checkpoint; or how it was lost.
        notice_s: Seconds from when memory was short to when the guard noticed; None if it never was, or never did.
        first_rung_s: To the guard's first action.
        shed_s: To when the micro-batch was smaller, by the guard or by an out-of-memory error, whichever came first.
        hog_s: From when the hog began to when memory was short.
        actions: What the trace file says, in order.
        recoveries: Steps repeated after a real out-of-memory error.
        smallest: Rows of the smallest micro-batch.
        steps_lost: Those of an undisturbed run that this one lacks.
        difference: Of its weights to those of an undisturbed run whose batches are cut alike; 0.0 is every bit.
        rounding: Of its weights to those of an undisturbed run whose batches are whole.
        other_state: What else differs at the end.
        least_available: The least that was left, bytes.
    """

    index: int
    what: str
    ended: str
    notice_s: float | None
    first_rung_s: float | None
    shed_s: float | None
    hog_s: float | None
    actions: list[str]
    recoveries: int
    smallest: int
    steps_lost: int | None
    difference: float | None
    rounding: float | None
    other_state: list[str]
    least_available: int | None

    @property
    def sound(self) -> bool:
        """Whether the run came to its end, and learnt what an undisturbed one does."""
        same = self.difference == 0.0 and not self.other_state and self.steps_lost == 0
        near = self.rounding is not None and self.rounding <= LARGEST
        return not self.ended.startswith("lost") and same and near


def draw_case(seed: int, index: int, *, batches: int) -> Case:
    """Return the case of this number, always the same one."""
    draw = random.Random(f"{seed}/{index}")
    fixed = {"model": "wide", "batch": 32, "rows": 32 * batches, "micro": "auto", "epochs": 1, "max_steps": -1}
    ends = {"validate_every": 10**6, "save_every": 20, "patience": 32, "watched": False, "precision": "32-true"}
    recipe = draw_recipe(draw, **fixed, **ends, window=draw.choice([1, 2]))
    spare = draw.randint(60, 160) * MIB
    hog = Hog(
        after=draw.uniform(1.5, 2.5),
        rate=draw.choice([30, 100, 500]) * MIB,
        leaves=draw.choice([0, 4, 8, 16]) * MIB,
        most=spare + draw.choice([20, 50, 80]) * MIB,
        lasts=draw.choice([4.0, 8.0, 1e9]),
    )
    stop, keeps = draw.random() < 0.5, draw.random() < 0.7
    return Case(index=index, recipe=recipe, spare=spare, hog=hog, stop=stop, keeps=keeps)


class Conduct(L.Callback):
    """Waits after each batch.

    If the case requires it, glibc keeps freed memory (mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps

    def on_train_start(self, *_):
        if self._keeps:
            for option in (-1, -3):
                ctypes.CDLL(None).mallopt(option, 2**30)

    def on_train_batch_end(self, *_):
        time.sleep(PACE)


def run_case(case: Case, folder: Path, *, every_s: float) -> Row:
    """Run the case in its machine, then what it is compared with, and say what became of it."""
    run = folder / "run"
    run.mkdir(parents=True)
    guard = Guard(run, every_s=every_s, stop=case.stop)
    machine = Machine(run, started=run / STARTED, spare=case.spare, hog=case.hog)
    try:
        fit = Fit(recipe=case.recipe, folder=run, callbacks=(Conduct(keeps=case.keeps), guard))
        ended = in_process(partial(train, fit), log=run / "log", timeout=TIMEOUT, beside=machine.tend)
    finally:
        machine.end()
    final, newest = _load(run), run / "checkpoints" / "last.ckpt"
    outcome = "went on" if final else _in_words(ended)
    stopped = final is not None and final["batches"] < case.recipe.batches
    if stopped or (final is None and ended.code < 0 and not ended.hung and newest.exists()):
        outcome = "stopped, then resumed" if stopped else "killed, then resumed"
        (run / FINAL).unlink(missing_ok=True)
        in_process(partial(train, Fit(recipe=case.recipe, folder=run, resume=newest)), log=run / "log", timeout=TIMEOUT)
        final = _load(run)
    return _row(case, folder, final=final, outcome=outcome, machine=machine)


def _undisturbed(recipe: Recipe, folder: Path, sizes: dict[int, list[int]] | None) -> dict[str, Any]:
    folder.mkdir()
    fit = Fit(recipe=recipe, folder=folder, replay=sizes)
    ended = in_process(partial(train, fit), log=folder / "log", timeout=TIMEOUT)
    state = _load(folder)
    if state is None:
        raise RuntimeError(f"the run to compare with ended with {_in_words(ended)}")
    return state


def _row(case: Case, folder: Path, *, final: dict[str, Any] | None, outcome: str, machine: Machine) -> Row:
    run, recipe = folder / "run", case.recipe
    ledger = read_ledger(run)
    sizes = {number: line["sizes"] for number, line in ledger.items()}
    whole = _undisturbed(recipe, folder / "whole", None)
    twin = _undisturbed(recipe, folder / "twin", sizes) if final else None
    path = run / "pressure.jsonl"
    trace = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    times = {line["action"].split(" to ")[0]: datetime.fromisoformat(line["time"]).timestamp() for line in trace[::-1]}
    shrunk = [line["at"] for line in ledger.values() if len(line["sizes"]) > 1]
    short = machine.short_since

    def since(moment: float | None) -> float | None:
        return None if moment is None or short is None else round(moment - short, 3)

    acted = [moment for action, moment in times.items() if action not in {"noticed", "over"}]
    return Row(
        index=case.index,
        what=f"{case.spare // MIB} MiB to spare; hog at {case.hog.rate // MIB} MiB/s up to {case.hog.most // MIB} MiB leaves "
        f"{case.hog.leaves // MIB} MiB for {min(case.hog.lasts, 999):.0f} s; window {recipe.window}; stop {case.stop}; keeps {case.keeps}",
        ended=outcome if final else f"lost: {outcome}",
        notice_s=since(times.get("noticed")),
        first_rung_s=since(min(acted, default=None)),
        shed_s=since(min(shrunk, default=None)),
        hog_s=None if short is None or machine.hog_began is None else round(short - machine.hog_began, 3),
        actions=[line["action"].replace(str(run), "") for line in trace],
        recoveries=len({line["batch"] for line in ledger.values() if line["recovered"]}),
        smallest=min(max(parts) for parts in sizes.values()) if sizes else 0,
        steps_lost=whole["steps"] - final["steps"] if final else None,
        difference=difference(final["weights"], twin["weights"]) if final and twin else None,
        rounding=difference(final["weights"], whole["weights"]) if final else None,
        other_state=other_state(final, twin) if final and twin else [],
        least_available=machine.least_available,
    )


def _load(folder: Path) -> dict[str, Any] | None:
    return torch.load(folder / FINAL, weights_only=False) if (folder / FINAL).exists() else None


def _in_words(ended: Ended) -> str:
    return "a hang" if ended.hung else f"{ended.error or ended.code} {ended.text[:300]}".strip()


def totals(rows: list[Row]) -> dict[str, Any]:
    """Return what all runs come to."""

    def spread(values: list[float | None]) -> dict[str, Any]:
        known = sorted(value for value in values if value is not None)
        return {
            "runs": len(known),
            "median": round(statistics.median(known), 2) if known else None,
            "longest": round(known[-1], 2) if known else None,
        }

    return {
        "runs": len(rows),
        **{ended: sum(row.ended == ended for row in rows) for ended in ENDS},
        "lost": sum(row.ended not in ENDS for row in rows),
        "with a real out-of-memory error": sum(row.recoveries > 0 for row in rows),
        "steps lost": sum(row.steps_lost or 0 for row in rows),
        "largest difference, cut alike": max((row.difference or 0.0 for row in rows), default=None),
        "largest difference to whole batches": max((row.rounding or 0.0 for row in rows), default=None),
        "noticed by the guard, with a trace": sum(bool(row.actions) for row in rows),
        "unsound": sum(not row.sound for row in rows),
        "seconds": {
            "from the second process's start to the shortage": spread([row.hog_s for row in rows]),
            "from the shortage to being noticed": spread([row.notice_s for row in rows]),
            "from the shortage to the first rung": spread([row.first_rung_s for row in rows]),
            "from the shortage to a smaller micro-batch": spread([row.shed_s for row in rows]),
        },
    }


def main() -> int:
    """Run the campaign; the exit code says whether anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, help="one run, by its number")
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many at once; more than there are cores for make it slower to notice"
    )
    parser.add_argument("--every-s", type=float, default=1.0, help="PressureGuard(every_s=…)")
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    scratch, begun = records.prepare("pressure"), time.monotonic()
    for child in [_fork(options, worker, scratch) for worker in range(options.jobs)]:
        os.waitpid(child, 0)
    rows = [Row(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(scratch.glob("*.json"))]
    given = f"--runs {options.runs} --seed {options.seed} --every-s {options.every_s} --batches {options.batches}"
    record = records.origin(f"python -m benchmarks.recovery.pressure_campaign {given}")
    record |= {"seconds": round(time.monotonic() - begun, 1), "totals": totals(rows)}
    record["runs"] = [{**asdict(row), "sound": row.sound} for row in rows]
    records.write(record, options.output)
    print(json.dumps(record["totals"], indent=1))
    shutil.rmtree(scratch)
    return int(any(not row.sound for row in rows) or len(rows) < len(_numbers(options)))


def _numbers(options: argparse.Namespace) -> list[int]:
    return list(range(options.runs)) if options.index is None else [options.index]


def _fork(options: argparse.Namespace, worker: int, scratch: Path) -> int:
    """Start a process that takes every `jobs`-th run; each run has a machine of its own."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for index in _numbers(options)[worker :: options.jobs]:
            case = draw_case(options.seed, index, batches=options.batches)
            row = run_case(case, scratch / f"{index:03d}", every_s=options.every_s)
            line = json.dumps(asdict(row), ensure_ascii=False)
            (scratch / f"{index:03d}.json").write_text(line, encoding="utf-8")
            print(line, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
