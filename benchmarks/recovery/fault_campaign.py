"""Run hundreds of small fits with injected faults, and look for losses.

The faults are memory that runs out, full disks, signals and kills.

    python -m benchmarks.recovery.fault_campaign [--runs 500] [--seed 0] [--jobs 2] [--only KIND] [--seconds T] [--output FILE]

Each run is compared with one of the same seed that nothing disturbed. Linux only: runs are forked, and die by real signals.
"""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}  # before torch and numpy: a fork must have no threads, and autograd starts one for every GPU

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks import records
from benchmarks.recovery.campaign.cases import KINDS, draw_case
from benchmarks.recovery.campaign.judging import Row, judge

RESULTS = Path(__file__).with_suffix(".json")
TIMEOUT = 240.0  # seconds for a process that usually takes a few; a busy machine takes many times that


def main() -> int:
    """Run the campaign; the exit code says whether anything was lost."""
    options = _options()
    scratch, begun = records.prepare("faults"), time.monotonic()
    children = [_fork(options, worker, scratch, begun) for worker in range(options.jobs)]
    for child in children:
        os.waitpid(child, 0)
    rows = sorted(_collected(scratch), key=lambda row: row.index)
    unsound = [row for row in rows if not row.sound]
    record = records.origin(f"python -m benchmarks.recovery.fault_campaign --runs {options.runs} --seed {options.seed}")
    record |= {"seconds": round(time.monotonic() - begun, 1), "totals": totals(rows)}
    record["runs"] = [{**asdict(row), "sound": row.sound} for row in rows]
    records.write(record, options.output)
    print(records.markdown(record["totals"], first="fault"))
    for row in unsound:
        print(f"\n{row.kind} {row.index}: {json.dumps(asdict(row), ensure_ascii=False)}")
    if unsound:
        print(f"\nWhat these runs left is in {scratch}")
    else:
        shutil.rmtree(scratch)
    return int(bool(unsound) or len(rows) == 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="decides all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--only", choices=list(KINDS), help="one kind of fault")
    parser.add_argument("--index", type=int, help="one run, by its number")
    parser.add_argument("--seconds", type=float, help="begin no run after this time")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the record goes")
    return parser.parse_args()


def _planned(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Yield number and kind of each run.

    Kinds alternate, so that the first n runs cover all of them.
    """
    kinds = list(KINDS)
    for index in range(options.runs) if options.index is None else [options.index]:
        yield index, options.only or kinds[index % len(kinds)]


def _fork(options: argparse.Namespace, worker: int, scratch: Path, begun: float) -> int:
    """Start a process that takes every `jobs`-th run."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (scratch / f"rows-{worker}.jsonl").open("w", encoding="utf-8") as file:
            for place, (index, kind) in enumerate(_planned(options)):
                if place % options.jobs != worker:
                    continue
                if options.seconds is not None and time.monotonic() - begun > options.seconds:
                    break
                folder = scratch / f"{index:05d}"
                row = judge(draw_case(options.seed, index, kind), folder, timeout=TIMEOUT)
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
                if row.sound:
                    shutil.rmtree(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _collected(scratch: Path) -> Iterator[Row]:
    for path in sorted(scratch.glob("rows-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield Row(**json.loads(line))


def totals(rows: list[Row]) -> dict[str, dict]:
    """Return what the runs of each kind, and all of them, come to."""
    found = {}
    for kind in [*KINDS, "all"]:
        mine = [row for row in rows if kind in ("all", row.kind)]
        if mine:
            found[kind] = {
                "runs": len(mine),
                "went on": sum(row.ended == "went on" for row in mine),
                "resumed": sum(row.ended == "resumed" for row in mine),
                "lost": sum(row.ended == "lost" for row in mine),
                "steps": sum(row.steps for row in mine),
                "steps lost": sum(row.steps_lost for row in mine),
                "steps redone": sum(row.steps_redone for row in mine),
                "struck": sum(row.struck for row in mine),
                "never struck": sum(row.struck == 0 for row in mine),
                "recoveries": sum(row.recoveries for row in mine),
                "said to differ": sum(row.said and not row.is_same for row in mine),
                "largest difference": _largest(row.difference for row in mine if not row.said),
                "largest rounding": _largest(row.rounding for row in mine if not row.said),
                "counted twice": sum(row.counted_twice for row in mine),
                "missed": sum(row.missed for row in mine),
                "state or logs differ": sum(bool(row.other_state or row.logs_differ) and not row.said for row in mine),
                "hangs": sum(row.hung for row in mine),
                "unsound": sum(not row.sound for row in mine),
            }
    return found


def _largest(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


if __name__ == "__main__":
    sys.exit(main())
