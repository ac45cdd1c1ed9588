"""Predicted and counted peaks of one rank of several, on the CPU.

Each cell trains a module of the zoo in 2 or 4 processes and counts what torch's CPU allocator gives. The collectives go through a file
(`harness/shared_memory.py`), because gloo's own copies are no part of a step. `predict(devices=…, strategy=…)` runs in this process.

    python -m benchmarks.planner.several_devices            all cells, and the record
    python -m benchmarks.planner.several_devices --only mlp  the cells of one module, without a record
"""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.planner.harness.ranks import RankCell, measured, peak_of_this_rank
from benchmarks.planner.zoo.modules import MODULES
from benchmarks.records import origin, prepare, write
from lightning_unified import predict

RECORD = Path(__file__).with_name("records") / "several_devices_cpu.json"
_MODULES = ("mlp", "gearhead-small", "tied 150k vocabulary")
_SHARDED = (("fsdp", "auto"), ("unified_fsdp", "parameters"), ("unified_fsdp", "shards"))
_SETTINGS = ((2, False), (2, True), (4, False), (4, True))


def cells() -> Iterator[RankCell]:
    """Yield each module sharded over 2 and 4 ranks, and cells with other settings."""
    for name, (strategy, hold), (devices, recompute) in product(_MODULES, _SHARDED, _SETTINGS):
        yield RankCell(
            module=name,
            devices=devices,
            strategy=strategy,
            hold=hold,
            recompute=recompute,
            rows=MODULES[name].cpu.rows[0],
        )
    for name in _MODULES:
        yield RankCell(module=name, devices=2, strategy="unified_ddp", rows=MODULES[name].cpu.rows[0])
    for (strategy, hold), precision in product(_SHARDED, ("bf16-mixed", "bf16-true")):
        yield RankCell(module="bert-like", devices=2, strategy=strategy, hold=hold, precision=precision, rows=4)


def predicted(cell: RankCell) -> int:
    """Return the predicted peak of a rank."""
    kind = MODULES[cell.module]
    found = predict(
        kind.build("cpu", optimizer=cell.optimizer),
        kind.batch("cpu", cell.rows),
        device="cpu",
        precision=cell.precision,
        recompute=cell.recompute or None,
        devices=cell.devices,
        strategy=cell.strategy,  # type: ignore[arg-type]
        hold=cell.hold,  # type: ignore[arg-type]
    )
    return found.peak_bytes


def run_cell(cell: RankCell) -> dict[str, Any]:
    """Return a cell with its predicted and its counted peak, that of the rank that took most."""
    guess, found = predicted(cell), measured(cell)
    error = guess / max(found) - 1
    return {**cell.to_dict(), "predicted": guess, "counted": found, "error_percent": round(100 * error, 3)}


def main() -> None:
    """Run all cells, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="the name of one module")
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        prepare("ranks")
        peak = peak_of_this_rank(RankCell(**json.loads(asked.rank_of)), Path(os.environ["RANKS_FOLDER"]))
        print(json.dumps({"peak_bytes": peak}))
        return
    prepare("several-devices")
    runs = []
    for cell in cells():
        if asked.only in (None, cell.module):
            runs.append(run_cell(cell))
            print(json.dumps(runs[-1]), flush=True)
    print("largest error: {} %".format(max(abs(run["error_percent"]) for run in runs)))
    if asked.only is None:
        what = {"what": "peak of one rank: predicted, and counted by torch's CPU allocator; not run on GPUs"}
        write({**what, **origin("python -m benchmarks.planner.several_devices"), "runs": runs}, asked.record)


if __name__ == "__main__":
    main()
