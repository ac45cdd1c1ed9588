"""Run hundreds of small fits under unified_fsdp with a fault on one rank; count losses.

The faults are memory that runs out on one rank, SIGTERM and SIGKILL.

    python -m benchmarks.recovery.ranks.rank_campaign [--runs 500] [--seed 0] [--only FAULT] [--seconds T] [--output FILE]

Each run is compared with one process that nothing disturbed, on the ranks' joined batches. Linux only: ranks are forked, and die by real
signals.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch

import argparse
import json
import pickle
import random
import shutil
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.recovery.ranks.training import BATCHES, FAULTS, Case, fit

RESULTS = Path(__file__).with_suffix(".json")
TIMEOUT = 90.0  # seconds for a start that usually takes two
MOST_STARTS = 3  # a start that a fault ends, and those that go on from its checkpoint
ROUNDING = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The outcome of a run.

    Attributes:
        index: The run's number.
        fault: What struck it.
        ranks: Number of processes.
        hold: What ranks held whole.
        struck: How often a fault struck.
        starts: How often the run was started.
        recoveries: Repeated steps, over all ranks of the last start.
        difference: The largest difference of a weight from those of one process; None if the run did not end.
        hung: Whether a process had not ended in time.
        said: The errors with which the first start ended.
        seconds: How long it took.
    """

    index: int
    fault: str
    ranks: int
    hold: str
    struck: int
    starts: int
    recoveries: int
    difference: float | None
    hung: bool
    said: list[str]
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether nothing hung, differed or was lost."""
        return not self.hung and self.difference is not None and self.difference <= ROUNDING


def main() -> int:
    """Run the campaign; the exit code says whether anything was lost."""
    options = _options()
    scratch, begun = records.prepare("ranks"), time.monotonic()
    rows: list[Row] = []
    with (scratch / "rows.jsonl").open("w", encoding="utf-8") as file:
        for index in range(options.runs) if options.index is None else [options.index]:
            if options.seconds is not None and time.monotonic() - begun > options.seconds:
                break
            case = draw_case(options.seed, index, options.only or FAULTS[index % len(FAULTS)])
            rows.append(judge(case, scratch / f"{index:05d}"))
            file.write(json.dumps(asdict(rows[-1])) + "\n")
            file.flush()
            if not rows[-1].sound:
                print(json.dumps([asdict(case), asdict(rows[-1])]), flush=True)
    only = "" if options.only is None else f" --only '{options.only}'"
    command = f"python -m benchmarks.recovery.ranks.rank_campaign --runs {len(rows)} --seed {options.seed}{only}"
    record = records.origin(command)
    record |= {"seconds": round(time.monotonic() - begun, 1), "totals": totals(rows)}
    record["runs"] = [{**asdict(row), "sound": row.sound} for row in rows]
    records.write(record, options.output)
    print(records.markdown(record["totals"], first="fault"))
    if all(row.sound for row in rows):
        shutil.rmtree(scratch)
    return int(not rows or not all(row.sound for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="decides all of them")
    parser.add_argument("--only", choices=list(FAULTS), help="one kind of fault")
    parser.add_argument("--index", type=int, help="one run, by its number")
    parser.add_argument("--seconds", type=float, help="begin no run after this time")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the record goes")
    return parser.parse_args()


def draw_case(seed: int, index: int, fault: str) -> Case:
    """Return the case of this number and fault, always the same one."""
    draw = random.Random(f"{seed}/{index}/{fault}")
    ranks = draw.choice([2, 2, 2, 4])
    return Case(
        index=index,
        fault=fault,
        ranks=ranks,
        hold=draw.choice(["parameters", "shards"]),
        micro=draw.choice(["auto", 2, 1]) if ranks == 2 else "auto",
        window=draw.choice([1, 1, 2]),
        clip=draw.choice([None, 0.05]),
        optimizer=draw.choice(["AdamW, foreach", "AdamW, for-loop", "SGD"]),
        victim=draw.randrange(ranks),
        batch=draw.randrange(1, BATCHES - 2),
        nth=draw.randrange(6),
    )


def judge(case: Case, folder: Path) -> Row:
    """Run a case to its end, and compare it with an undisturbed one.

    A start that a signal ended is followed by one that resumes.
    """
    folder.mkdir()
    begun, said, hung, ended, starts = time.monotonic(), [], False, None, 0
    for starts in range(1, MOST_STARTS + 1):
        results, stuck = _start(case, folder, strikes=starts == 1)
        hung = hung or stuck
        errors = [str(result) for result in results if not isinstance(result, dict)]
        said = said or errors
        if not errors and all(result["batches"] == BATCHES for result in results):
            ended = results
            break
    difference = None
    if ended is not None:
        plain = _plain(case)
        difference = max(float((result["weights"] - plain).abs().max()) for result in ended)
    row = Row(
        index=case.index, fault=case.fault, ranks=case.ranks, hold=case.hold,
        struck=len(list(folder.glob("struck-*"))), starts=starts,
        recoveries=0 if ended is None else sum(result["recoveries"] for result in ended),
        difference=difference, hung=hung, said=said[:4], seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip
    if row.sound:
        shutil.rmtree(folder)
    return row


_PLAIN: dict[tuple[Any, ...], torch.Tensor] = {}


def _plain(case: Case) -> torch.Tensor:
    """Return the weights of one process that nothing disturbs."""
    key = (case.window, case.clip, case.optimizer)
    if key not in _PLAIN:
        _PLAIN[key] = fit(replace(case, micro="auto"), Path("/nonexistent"), rank=0, ranks=1, strikes=False)["weights"]
    return _PLAIN[key]


def _start(case: Case, folder: Path, *, strikes: bool) -> tuple[list[Any], bool]:
    """Run all ranks of a case; return what each came to, and whether one had to be killed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = [_fork(case, folder, rank, port, strikes=strikes) for rank in range(case.ranks)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(codes) < case.ranks and time.monotonic() < deadline:
        for rank, child in enumerate(children):
            if rank not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    stuck = [child for rank, child in enumerate(children) if rank not in codes]
    for child in stuck:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return [_result(folder / f"rank-{rank}", codes.get(rank)) for rank in range(case.ranks)], bool(stuck)


def _result(path: Path, code: int | None) -> Any:
    if not path.exists():
        return f"ended with {code}"
    result = pickle.loads(path.read_bytes())
    path.unlink()
    return result


def _fork(case: Case, folder: Path, rank: int, port: int, *, strikes: bool) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (folder / f"output-{rank}").open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                result: Any = fit(case, folder, rank=rank, ranks=case.ranks, strikes=strikes)
            except BaseException as error:
                traceback.print_exc()
                result = f"{type(error).__name__}: {str(error)[:300]}"
            (folder / f"rank-{rank}").write_bytes(pickle.dumps(result))
    finally:
        os._exit(0)


def totals(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return what the runs of each fault, and all of them, come to."""
    found = {}
    for fault in [*FAULTS, "all"]:
        mine = [row for row in rows if fault in ("all", row.fault)]
        if mine:
            differences = [row.difference for row in mine if row.difference is not None]
            found[fault] = {
                "runs": len(mine),
                "hold parameters": sum(row.hold == "parameters" for row in mine),
                "hold shards": sum(row.hold == "shards" for row in mine),
                "struck": sum(row.struck for row in mine),
                "never struck": sum(row.struck == 0 for row in mine),
                "recoveries": sum(row.recoveries for row in mine),
                "resumed": sum(row.starts > 1 for row in mine),
                "hung": sum(row.hung for row in mine),
                "different": sum(difference > ROUNDING for difference in differences),
                "largest difference": max(differences, default=None),
                "lost": sum(row.difference is None for row in mine),
            }
    return found


if __name__ == "__main__":
    sys.exit(main())
