"""Measure `strategy="unified_fsdp"` beside FSDP2 alone and beside Lightning's.

A decoder of 3.2 billion parameters trains on the ranks of one machine, each side in processes of its own:

    bare        a loop around `fully_shard`
    lightning   `ModelParallelStrategy`, whose `configure_model` shards the same way
    ours        `UnifiedFSDPStrategy`, which shards by itself; one side for each `--hold`

All sides have the same groups, optimizer, precision and activation checkpointing. Then the rivals and ours train once more under a cap of
0.6 of the peak of `bare` on each rank, which ours also gets as its budget. Bars:

    time        a step of ours takes at most 1.03 of a step of `lightning`, and 1.05 of one of `bare`
    cap         both rivals run out of memory, and ours trains to the end within the cap
    prediction  the predicted peak of each rank is within 2 % of the counted one

The sides import before the first one runs. A side that hangs or dies is recorded, and the next one runs. On a CPU the cap is RLIMIT_DATA, peaks
are those of the resident process less what it held before, and predictions, which are of the whole process, are not judged.

Usage: python -m benchmarks.overhead.ranks.sharded_ranks [--ranks 2] [--hold auto shards] [--rounds 1] [--steps 10] [--rows 16] [--rollback]
       python -m benchmarks.overhead.ranks.sharded_ranks --accelerator cpu --small
       (writes benchmarks/overhead/ranks/sharded_ranks.json after each side, or --output; --small writes nothing without --output)
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.overhead.ranks.sharding import WARM
from benchmarks.overhead.ranks.sharding.decoder import LARGE, SMALL
from benchmarks.records import origin, write

GIB = 2**30
RECORD = Path(__file__).with_suffix(".json")
SHARE = 0.6  # of the peak of `bare`
BARS = {"lightning": 1.03, "bare": 1.05}
MOST_OFF = 0.02
READY_S = 120.0
GRACE_S = 10.0  # for the other ranks, after one has ended with an error
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|allocate memory|bad_alloc|MemoryError", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to train.

    Attributes:
        kind: `"bare"`, `"lightning"` or `"ours"`.
        hold: As `UnifiedFSDPStrategy` takes it; None for the rivals.
        capped: Whether the cap is on.
        turn: The round, from 0.
    """

    kind: str
    hold: str | None = None
    capped: bool = False
    turn: int = 0

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.hold, "capped" if self.capped else "")))

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '-')}-{self.turn}"


def sides(options: argparse.Namespace) -> list[Side]:
    """Return the sides in the order of their runs; every second round is in the reverse order."""
    found: list[Side] = []
    for turn in range(options.rounds):
        one = [Side(kind=kind, turn=turn) for kind in ("bare", "lightning")]
        one += [Side(kind="ours", hold=hold, turn=turn) for hold in options.hold]
        found += reversed(one) if turn % 2 else one
    found += [Side(kind=kind, capped=True) for kind in ("bare", "lightning")]
    # whole parameters and gradients exceed the cap
    found += [Side(kind="ours", hold=hold, capped=True) for hold in options.hold if hold != "parameters"]
    return [side for side in found if options.only is None or side.name in options.only]


class Ranks:
    """The processes of a side, which import at once and wait for `run`."""

    def __init__(self, side: Side, options: argparse.Namespace, case: dict[str, Any], folder: Path) -> None:
        self.side, self._folder = side, folder
        work = {
            "name": side.file, "kind": side.kind, "hold": side.hold, "case": case, "folder": str(folder), "ranks": options.ranks,
            "accelerator": options.accelerator, "steps": options.steps, "rollback": options.rollback, "limit_s": options.limit_s,
        }  # fmt: skip
        self._processes = [self._start(work, rank) for rank in range(options.ranks)]

    def _start(self, work: dict[str, Any], rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.overhead.ranks.sharding.rank", json.dumps({**work, "rank": rank})]
        with self._file(rank, "log").open("w") as log:
            environ = {**os.environ, "TMPDIR": str(self._folder)}  # what killed ranks leave is removed too
            return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"{self.side.file}-{rank}.{kind}"

    def is_ready(self) -> bool:
        """Return whether all ranks have imported, or are gone."""
        return all(
            self._file(rank, "ready").exists() or one.poll() is not None for rank, one in enumerate(self._processes)
        )

    def run(self, *, cap: int | None, limit_s: float) -> list[dict[str, Any]]:
        """Let the ranks train; return what each found, or the `error` with which it ended."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            told = json.dumps({"port": listener.getsockname()[1], "cap": cap})
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it is gone, and its output says why
                print(told, file=process.stdin, flush=True)
        end = time.monotonic() + limit_s
        has_failed = False
        while any(process.poll() is None for process in self._processes) and time.monotonic() < end:
            if not has_failed and any(process.poll() for process in self._processes):
                has_failed, end = True, min(end, time.monotonic() + GRACE_S)
            time.sleep(0.1)
        why = "waited for a rank that had ended" if has_failed else f"did not end within {limit_s:.0f} s"
        hung = [process.poll() is None for process in self._processes]
        self.kill()
        return [self._found(rank, why if hung[rank] else "") for rank in range(len(self._processes))]

    def _found(self, rank: int, why: str) -> dict[str, Any]:
        if (path := self._file(rank, "json")).exists():
            return json.loads(path.read_text(encoding="utf-8"))
        said = self._file(rank, "log").read_text(encoding="utf-8", errors="replace")[-1500:]
        return {"error": f"{why or f'ended with exit code {self._processes[rank].returncode}'}: {said}".strip()}

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def row(side: Side, found: list[dict[str, Any]], *, cap: int | None, seconds: float) -> dict[str, Any]:
    """Return the record of a side's run, from what its ranks found."""

    def each(name: str, divisor: int | None = None) -> list[Any]:
        values = [one.get(name) for one in found]
        return values if divisor is None else [None if one is None else round(one / divisor, 4) for one in values]

    made: dict[str, Any] = {"side": side.name, "round": side.turn, "step_ms": None, "cycle_ms": None}
    if all(one.get("steps_ms") and "error" not in one for one in found):  # ranks wait for each other
        for name in ("step_ms", "cycle_ms"):
            steps = [one[name.replace("_ms", "s_ms")] for one in found]
            made[name] = round(max(statistics.median(one) for one in steps), 2)
            made[f"{name}_range"] = [round(min(map(min, steps)), 2), round(max(map(max, steps)), 2)]
    made |= {
        "allocated_gib": each("allocated", GIB),
        "reserved_gib": each("reserved", GIB),
        "predicted_gib": each("predicted", GIB),
        "cap_gib": None if cap is None else round(cap / GIB, 4),
        "steps": each("steps"),
        "last_loss": each("loss"),
        "error": each("error") if any(each("error")) else None,
    }
    if side.kind == "ours":
        told = ("holds", "micro_batch_size", "micro_batches", "recompute", "recoveries")
        made |= {name: each(name) for name in told}
        made |= {"events": found[0].get("events"), "reasons": found[0].get("reasons")}
    return made | {"devices": each("device"), "setup_s": each("setup_s"), "seconds": round(seconds, 1)}


def judge(runs: list[dict[str, Any]], *, steps: int, on_cpu: bool = False) -> dict[str, dict[str, Any]]:
    """Return each bar with its value, its limit and whether it is met.

    None stands for a value that a missing side leaves open.
    """
    sides_run: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        if "skipped" not in one:
            sides_run.setdefault(one["side"], []).append(one)
    bars: dict[str, dict[str, Any]] = {}
    ours = [name for name in sides_run if name.startswith("ours")]
    for name, (rival, limit) in ((name, bar) for name in ours for bar in BARS.items() if "capped" not in name):
        mine, theirs = (_median(sides_run.get(side, [])) for side in (name, rival))
        value = round(mine / theirs, 4) if mine and theirs else None
        bars[f"step of {name} / {rival}"] = _bar(value, limit)
    for name in ("bare capped", "lightning capped"):
        if name in sides_run:
            errors = [str(error) for one in sides_run[name] for error in one["error"] or ()]
            died = any(OUT_OF_MEMORY.search(error) for error in errors)
            bars[f"{name} runs out of memory"] = {"value": died, "met": died}
    for name in ours:
        if "capped" in name:
            goes_on = all(_is_within(one, steps, on_cpu=on_cpu) for one in sides_run[name])
            bars[f"{name} goes on"] = {"value": goes_on, "met": goes_on}
        if not on_cpu:
            bars[f"predicted peak of {name}, off by"] = _bar(_most_off(sides_run[name]), MOST_OFF)
    return bars


def _bar(value: float | None, limit: float) -> dict[str, Any]:
    return {"value": value, "limit": limit, "met": None if value is None else value <= limit}


def _median(runs: list[dict[str, Any]]) -> float | None:
    """Return the median of the rounds' times of a step."""
    found = [one["step_ms"] for one in runs if one["step_ms"] is not None]
    return statistics.median(found) if found else None


def _most_off(runs: list[dict[str, Any]]) -> float | None:
    """Return by which share of the counted peak the worst prediction is off."""
    pairs = [pair for one in runs for pair in zip(one["predicted_gib"], one["allocated_gib"], strict=True)]
    offs = [abs(guess / counted - 1) for guess, counted in pairs if guess and counted]
    return round(max(offs), 4) if offs and len(offs) == len(pairs) else None


def _is_within(one: dict[str, Any], steps: int, *, on_cpu: bool) -> bool:
    """Return whether a capped run made all steps, within its cap if that limits tensors alone."""
    ended = one["error"] is None and one["steps"] == [steps] * len(one["steps"])
    return ended and (on_cpu or max(one["reserved_gib"]) <= one["cap_gib"])


def _case(options: argparse.Namespace) -> dict[str, Any]:
    case = dict(SMALL if options.small else LARGE)
    given = {"rows": options.rows, "precision": options.precision}
    return case | {name: value for name, value in given.items() if value is not None}


def main() -> int:
    """Run all sides; the exit code says whether one of ours failed."""
    options = _options()
    case, began = _case(options), time.monotonic()
    about = {
        **origin(" ".join(["python", "-m", "benchmarks.overhead.ranks.sharded_ranks", *sys.argv[1:]])),
        "ranks": options.ranks, "case": case, "steps": options.steps, "optimizer_rollback": options.rollback,
    }  # fmt: skip
    runs: list[dict[str, Any]] = []
    bars: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="sharded-ranks-") as folder:
        waiting = [Ranks(side, options, case, Path(folder)) for side in sides(options)]
        try:
            while not all(one.is_ready() for one in waiting) and time.monotonic() - began < READY_S:
                time.sleep(0.1)
            about["imports_s"] = round(time.monotonic() - began, 1)
            for ranks in waiting:
                runs.append(_run_one(ranks, options, runs, left_s=options.total_s - (time.monotonic() - began)))
                print(json.dumps(runs[-1], ensure_ascii=False), flush=True)
                bars = judge(runs, steps=options.steps, on_cpu=options.accelerator == "cpu")
                if options.output is not None:
                    write({**about, "bars": bars, "runs": runs}, options.output)
        finally:
            for ranks in waiting:
                ranks.kill()
    print(json.dumps(bars, indent=1, ensure_ascii=False))
    return int(any(one.get("error") for one in runs if one["side"].startswith("ours")))


def _run_one(ranks: Ranks, options: argparse.Namespace, runs: list[dict[str, Any]], *, left_s: float) -> dict[str, Any]:
    """Run a side, and return its record; a side that cannot run is named with the reason."""
    side, cap = ranks.side, None
    if left_s < 5:
        return {"side": side.name, "round": side.turn, "skipped": f"{options.total_s:.0f} s are over"}
    if side.capped:
        peaks = [one["allocated_gib"] for one in runs if one["side"] == "bare" and not one.get("error")]
        if options.cap_gib is None and not peaks:
            return {"side": side.name, "round": side.turn, "skipped": "no peak of `bare` to take a share of"}
        cap = int(GIB * (options.cap_gib or SHARE * max(map(max, peaks))))
    began = time.monotonic()
    found = ranks.run(cap=cap, limit_s=min(options.limit_s, left_s))
    return row(side, found, cap=cap, seconds=time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="processes, one a device (default: 2)")
    holds = ("auto", "parameters", "shards")
    parser.add_argument("--hold", nargs="+", choices=holds, default=["auto"], help="sides of ours (default: auto)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side without a cap (default: 1)")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a run, two or more (default: 10)")
    parser.add_argument("--rows", type=int, help="rows of a rank's batch")
    parser.add_argument("--precision", choices=("bf16-true", "bf16-mixed", "32-true"))
    parser.add_argument("--rollback", action="store_true", help="ours with optimizer_rollback=True")
    parser.add_argument("--cap-gib", type=float, help="the cap (default: 0.6 of the peak of bare)")
    parser.add_argument("--only", nargs="+", metavar="SIDE", help='names of sides, such as "ours auto capped"')
    parser.add_argument("--limit-s", type=float, help="seconds of a side (default: 60, on a CPU 120)")
    parser.add_argument("--total-s", type=float, help="seconds of all sides (default: 240, on a CPU 900)")
    parser.add_argument("--output", type=Path, help="the record (default: beside the script)")
    parser.add_argument("--small", action="store_true", help="a decoder for a CPU")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: give 2 or more")
    on_cpu = options.accelerator == "cpu"
    options.limit_s = options.limit_s or (120.0 if on_cpu else 60.0)
    options.total_s = options.total_s or (900.0 if on_cpu else 240.0)
    options.steps += WARM
    if options.output is None and not options.small:
        options.output = RECORD
    return options


if __name__ == "__main__":
    sys.exit(main())
