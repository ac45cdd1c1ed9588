"""Cost of loader processes by start method: seconds until the first batch, and memory.

One row has no processes. The others are of a plain `DataLoader`, or ours, which makes batches in the run until the processes have started.

The rows are arrays in memory, as the package's data modules hold them; a batch gathers some of them. A process's own memory is what it
shares with no other (Private_Clean and Private_Dirty of /proc/PID/smaps_rollup). CPU seconds are of the processes and of their server.
Each row is measured in a process of its own, as `forkserver` keeps its server.

Usage: python -m benchmarks.overhead.loader_workers
       (writes benchmarks/overhead/loader_workers.json; under two minutes; Linux)
"""

import argparse
import json
import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified.data.loader import LoaderOptions, ResumableLoader
from lightning_unified.models.classifier.data.label_rows import LabelRows

RESULTS = Path(__file__).with_suffix(".json")
ROWS, LENGTH, BATCH = 50_000, 64, 64
STEP = 0.01  # seconds of a training step while processes start
WAYS: tuple[tuple[int, str | None, bool], ...] = (
    (0, None, False),
    *(
        (count, method, ours)
        for method in ("fork", "forkserver", "spawn")
        for count in (1, 2, 4)
        for ours in (False, True)
    ),
)


def rows() -> LabelRows:
    """Return texts of `LENGTH` tokens with labels."""
    return LabelRows([[7] * LENGTH] * ROWS, [0] * ROWS, lengths=[LENGTH], pad_id=0)


def same(batch: Any) -> Any:
    """Return a batch as it is; spawned processes need a function with a name."""
    return batch


def own_bytes(pid: int) -> int:
    """Return the bytes that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loader_of(dataset: LabelRows, workers: int, method: str | None, *, ours: bool) -> Any:
    """Return a loader of the rows, plain or ours."""
    if ours:
        options = LoaderOptions(batch_size=BATCH, num_workers=workers, start_method=method, persistent_workers=True)
        return ResumableLoader(dataset, options)
    sampler = BatchSampler(SequentialSampler(range(ROWS)), BATCH, drop_last=True)
    return DataLoader(
        dataset, batch_sampler=sampler, collate_fn=same, num_workers=workers, multiprocessing_context=method,
        persistent_workers=workers > 0,
    )  # fmt: skip


def measured(workers: int, method: str | None, *, ours: bool) -> dict[str, Any]:
    """Return the seconds of two batches, and the memory and CPU seconds of the processes."""
    loader = loader_of(rows(), workers, method, ours=ours)
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    while workers and loader._iterator is None:
        next(batches)
        time.sleep(STEP)
    processes = [process.pid for process in getattr(loader._iterator, "_workers", ())]
    began, count = time.perf_counter(), 300
    for _ in range(count):
        next(batches)
    later = (time.perf_counter() - began) / count
    memory = max(map(own_bytes, processes), default=0)
    server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "workers": workers,
        "start method": method,
        "loader": "ours" if ours else "plain",
        "first batch s": round(first, 2),
        "later batch ms": round(1000 * later, 3),
        "own MiB of a process": round(memory / 2**20),
        "CPU s of the start": round(sum(map(cpu_seconds, [*processes, *([server] if server else [])])), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--row", type=int, help="one of them, in this process")
    arguments = parser.parse_args()
    if arguments.row is not None:
        workers, method, ours = WAYS[arguments.row]
        print(json.dumps(measured(workers, method, ours=ours)))
        return
    prepare("loader-workers")
    command = [sys.executable, "-m", "benchmarks.overhead.loader_workers", "--row"]
    said = [
        subprocess.run([*command, str(row)], check=True, stdout=subprocess.PIPE, text=True).stdout
        for row in range(len(WAYS))
    ]
    runs = [json.loads(one) for one in said]
    named = {f"{run['workers']} {run['start method'] or ''} {run['loader']}": run for run in runs}
    print(markdown(named, first="way"))
    write({**origin("python -m benchmarks.overhead.loader_workers"), "runs": runs}, arguments.output)


if __name__ == "__main__":
    main()
