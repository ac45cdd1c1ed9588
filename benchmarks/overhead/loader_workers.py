"""Cost of loader processes by start method: seconds until the first batch, and memory.

One row has no processes.

The rows are arrays in memory, as the package's data modules hold them; a batch gathers some of them. A process's own memory is what it
shares with no other (Private_Clean and Private_Dirty of /proc/PID/smaps_rollup).

Usage: python -m benchmarks.overhead.loader_workers
       (writes benchmarks/overhead/loader_workers.json; under two minutes; Linux)
"""

import argparse
import time
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from benchmarks.records import markdown, origin, prepare, write
from lightning_unified.models.classifier.data.label_rows import LabelRows

RESULTS = Path(__file__).with_suffix(".json")
ROWS, LENGTH, BATCH = 50_000, 64, 64
WAYS: tuple[tuple[int, str | None], ...] = (
    (0, None), (1, "fork"), (2, "fork"), (1, "forkserver"), (2, "forkserver"), (1, "spawn"), (2, "spawn"), (4, "spawn"),
)  # fmt: skip


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


def measured(dataset: Any, workers: int, method: str | None) -> dict[str, Any]:
    """Return the seconds of the first and of a later batch, and a process's largest memory."""
    sampler = BatchSampler(SequentialSampler(range(ROWS)), BATCH, drop_last=True)
    loader = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=same, num_workers=workers, multiprocessing_context=method
    )  # fmt: skip
    began = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    processes = [process.pid for process in getattr(batches, "_workers", ())]
    memory = max(map(own_bytes, processes), default=0)
    began, count = time.perf_counter(), 300
    for _ in range(count):
        next(batches)
    later = (time.perf_counter() - began) / count
    return {
        "workers": workers,
        "start method": method,
        "first batch s": round(first, 2),
        "later batch ms": round(1000 * later, 3),
        "own MiB of a process": round(memory / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare("loader-workers")
    dataset = rows()
    runs = [measured(dataset, workers, method) for workers, method in WAYS]
    print(markdown({f"{run['workers']} {run['start method'] or ''}": run for run in runs}, first="way"))
    write({**origin("python -m benchmarks.overhead.loader_workers"), "runs": runs}, arguments.output)


if __name__ == "__main__":
    main()
