"""Inject silent GPU faults into simulated Macs, and measure the cost of detection.

    python -m benchmarks.recovery.gpu.faults [--runs 100] [--clean 10000] [--steps 400]

A simulated machine aborts a command buffer: none of its operations run, and their results keep what the memory held before, or NaN. Each
faulty run is compared with an undisturbed run that has the same micro-batches from the same batch on. The kinds:

- forward, backward, optimizer step: a buffer from a random operation of that phase to the next wait of the host, without a message, so that
  the canary alone can detect it; with `optimizer_rollback=True` in the optimizer step;
- trial run: the same in the exactness check's runs of the step, which come before the first split batch of a module with a metric;
- stopped optimizer step: the same without a copy of the weights, where the run must stop;
- message only: one to three operations between two marks of the canary, with the runtime's message;
- repeated: forward, two to four times in a row;
- persistent: forward, in every attempt, where the run must stop, and leave a file with the undisturbed weights up to that batch;
- short and silent: 1 to 20 operations from anywhere in the step, without a message. This is the limit of the method, and no bar.

The overhead is measured on the CPU without a simulation, with the watch over file descriptor 2: the checks of each step are timed by themselves,
and the median over the steps counts. `--costs` measures only this, and replaces it in the record. **Nothing here has run on a Mac.** Writes benchmarks/recovery/gpu/faults.json.
"""

import argparse
import gc
import json
import logging
import random
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor
from torchmetrics import SumMetric

from benchmarks.records import markdown, origin, prepare, write
from benchmarks.recovery.gpu.checks import BATCHES, ROWS, Layers, costs_of, data, trainer_of
from lightning_unified import UnifiedStrategy
from lightning_unified.errors import GpuFaultError
from lightning_unified.hardware.simulated import Abort

RESULTS = Path(__file__).with_suffix(".json")
BAR_MS = 0.2
MACHINE = "m2-16gb"
TO_THE_NEXT_WAIT = 10**9
SEEDS = 5  # of weights and rows: twins of the same sizes are then trained once
KINDS = (
    "forward",
    "backward",
    "optimizer step",
    "trial run",
    "stopped optimizer step",
    "message only",
    "repeated",
    "persistent",
)
LIMIT = "short and silent"
_POINT = {"backward": "backward", "optimizer step": "optimizer step", "stopped optimizer step": "optimizer step"}
_OPERATIONS = {"forward": 20, "backward": 15, "optimizer step": 20}  # the first so many of a phase, which every run has

# Beside the callbacks: the strategy puts a callback's own attributes back when it undoes a step.
_STRUCK: "WeakKeyDictionary[Strikes, int]" = WeakKeyDictionary()


class Counting(Layers):
    """Layers with a metric that has counted already, so that lost copies of it show."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()
        self.seen.update(100.0)

    def training_step(self, batch, batch_idx):
        self.seen.update(batch.sum())
        return super().training_step(batch, batch_idx)


class Strikes(L.Callback):
    """Aborts a command buffer in one batch, once or several times."""

    def __init__(self, batch: int, point: str, abort: Abort, *, times: int) -> None:
        self.batch, self.point, self.abort, self.times, self.at = batch, point, abort, times, -1
        _STRUCK[self] = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.at = batch_idx

    def strike(self, trainer, point: str) -> None:
        attempt = trainer.strategy.recoveries  # once in each attempt, in its first micro-batch
        if (self.at, point) == (self.batch, self.point) and _STRUCK[self] == attempt < self.times:
            _STRUCK[self] += 1
            trainer.strategy.simulated.command_queue.abort(self.abort)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.strike(trainer, "optimizer step")

    def setup(self, trainer, pl_module, stage):
        step = pl_module.training_step

        def training_step(batch, batch_idx):
            self.strike(trainer, "forward")
            loss = step(batch, batch_idx)
            self.strike(trainer, "backward")
            return loss

        pl_module.training_step = training_step


class Smaller(L.Callback):
    """The undisturbed twin: uses the smaller size from the same batch on."""

    def __init__(self, batch: int, size: int) -> None:
        self.batch, self.size = batch, size

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch:
            trainer.strategy.sizes.max_micro_batch_size = self.size


def simulated(**options: Any) -> UnifiedStrategy:
    """Return the strategy of a simulated Mac, without the slow predictions and checks."""
    return UnifiedStrategy(**{"simulate": MACHINE, "predict": False, "check_split": False, **options})


@cache
def undisturbed(folder: Path, seed: int, batch: int, size: int, *, in_trial: bool) -> Tensor:
    """Return the final state of a run that has micro-batches of `size` rows from `batch` on."""
    return trained(folder, seed, Smaller(batch, size), in_trial=in_trial)[1]


def trained(folder: Path, seed: int, *callbacks: L.Callback, rollback: bool = False, in_trial: bool = False) -> Any:
    """Run one simulated fit; return the strategy, the final state, and the error it ended with."""
    torch.manual_seed(seed % SEEDS)
    module = Counting() if in_trial else Layers()
    options = {"check_split": True, "micro_batch_size": ROWS // 2} if in_trial else {}
    strategy = simulated(optimizer_rollback=rollback, **options)
    error = None
    try:
        trainer_of(folder, strategy, *callbacks).fit(module, data())
    except GpuFaultError as failed:
        error = str(failed)
    state = [p.detach().flatten() for p in module.parameters()]
    if isinstance(module, Counting):
        state.append(module.seen.compute().flatten())
    return strategy, torch.cat(state), error


def drawn(seed: int, kind: str) -> Strikes:
    """Return the fault of a run, always the same one."""
    draw = random.Random(f"{seed}/{kind}")
    point = _POINT.get(kind) or (draw.choice(list(_OPERATIONS)) if kind in ("message only", LIMIT) else "forward")
    if kind == "message only" and point == "optimizer step":
        point = "backward"
    short = kind in ("message only", LIMIT)
    abort = Abort(
        after=draw.randrange(_OPERATIONS[point]),
        operations=draw.randint(1, 3 if kind == "message only" else 20) if short else TO_THE_NEXT_WAIT,
        leaves=draw.choice(["stale", "nan"]),
        says=kind == "message only",
        spares_integers=kind == "message only",
    )
    times = {"repeated": draw.randint(2, 4), "persistent": 10**9}.get(kind, 1)
    batch = 0 if kind == "trial run" else draw.randrange(BATCHES)
    return Strikes(batch, point, abort, times=times)


def judged(folder: Path, seed: int, kind: str) -> dict[str, Any]:
    """Run one fault, and compare its weights with those of the undisturbed twin."""
    strikes, in_trial = drawn(seed, kind), kind == "trial run"
    folder = folder / f"{kind}-{seed}"
    strategy, weights, error = trained(
        folder, seed, strikes, rollback=kind in ("optimizer step", LIMIT), in_trial=in_trial
    )
    size = strategy.micro_batch_size or ROWS
    saved = folder / "gpu_fault.ckpt"
    lost = strategy.simulated.command_queue.lost
    if error is None:
        same = torch.equal(weights, undisturbed(folder, seed % SEEDS, strikes.batch, size, in_trial=in_trial))
    else:
        same = None if kind == "stopped optimizer step" else saved_as_undisturbed(folder, seed, strikes, saved)
    saved.unlink(missing_ok=True)
    detected = strategy.recoveries if error is None else strategy.recoveries + 1
    return {
        "kind": kind,
        "seed": seed,
        "what": f"{strikes.point} of batch {strikes.batch}, {strikes.abort}",
        "operations lost": lost,
        "struck": _STRUCK[strikes],
        "detected": detected,
        "stopped": error is not None,
        "same": same,
    }


def _judged(folder: Path, case: tuple[str, int]) -> dict[str, Any]:
    return judged(folder, case[1], case[0])


def saved_as_undisturbed(folder: Path, seed: int, strikes: Strikes, saved: Path) -> bool:
    """Return whether the saved file has an undisturbed run's weights before the faulty batch."""
    if not saved.exists():
        return False
    held = torch.load(saved, weights_only=False)
    torch.manual_seed(seed % SEEDS)
    module = Layers()
    if strikes.batch:
        trainer_of(folder, simulated(), steps=strikes.batch).fit(module, data())
    same = all(torch.equal(held["state_dict"][name], value) for name, value in module.state_dict().items())
    return same and held["global_step"] == strikes.batch


def totals(runs: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what the runs of each kind come to."""
    found = {}
    for kind in (*KINDS, LIMIT):
        mine = [run for run in runs if run["kind"] == kind and run["operations lost"]]
        found[kind] = {
            "runs": len(mine),
            "faults": sum(run["struck"] for run in mine),
            "detected": sum(run["detected"] for run in mine),
            "runs with an undetected fault": sum(run["detected"] < run["struck"] for run in mine),
            "recovered": sum(not run["stopped"] for run in mine),
            "stopped": sum(run["stopped"] for run in mine),
            "weights differ": sum(run["same"] is False for run in mine),
        }
    return found


def false_alarms(folder: Path, steps: int) -> dict[str, Any]:
    """Return the alarms of a long simulated run without a fault."""
    strategy = simulated(micro_batch_size=ROWS // 2)
    torch.manual_seed(0)
    trainer_of(folder, strategy, steps=steps).fit(Layers(2), data(100))
    return {"steps": steps, "alarms": sum("GPU" in event for event in strategy.events)}


def renewed(folder: Path, steps: int, path: Path) -> int:
    """Replace the overhead in the record at `path`."""
    costs, record = costs_of(folder, steps), json.loads(path.read_text(encoding="utf-8"))
    made = origin(f"python -m benchmarks.recovery.gpu.faults --costs --steps {steps}")
    runs = record.pop("runs")
    write({**record, "overhead": costs, "overhead_made": made, "runs": runs}, path)
    print(markdown({f"{c['blocks']} blocks, {c['micro-batches']} micro-batches": c for c in costs}, first="step"))
    return int(max(c["checks_ms"] for c in costs) > BAR_MS)


def main() -> int:
    """Run everything, print tables, write the record; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="faulty runs of each kind")
    parser.add_argument("--clean", type=int, default=10_000, help="steps without a fault")
    parser.add_argument("--steps", type=int, default=400, help="timed steps of a fit")
    parser.add_argument("--costs", action="store_true", help="measure the overhead only")
    parser.add_argument("--jobs", type=int, default=2, help="processes for the faulty runs; times are measured in one")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the record goes")
    asked = parser.parse_args()
    folder = prepare("gpu-faults")
    if asked.costs:
        return renewed(folder, asked.steps, asked.output)
    logging.getLogger("lightning_unified").setLevel(logging.ERROR)
    gc.freeze()  # every recovery collects garbage, and the imported modules are none
    cases = [(kind, seed) for kind in (*KINDS, LIMIT) for seed in range(asked.runs)]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("fork")) as processes:
        alarms = processes.submit(false_alarms, folder, asked.clean)
        by_seed = sorted(cases, key=lambda case: case[1] % SEEDS)  # each process then trains few twins
        done = processes.map(partial(_judged, folder), by_seed, chunksize=max(len(cases) // (8 * asked.jobs), 1))
        runs = sorted(done, key=lambda run: cases.index((run["kind"], run["seed"])))
        clean = alarms.result()
    costs = costs_of(folder, asked.steps)
    command = (
        f"python -m benchmarks.recovery.gpu.faults --runs {asked.runs} --clean {asked.clean} --steps {asked.steps}"
    )
    found = totals(runs)
    record = {**origin(command), "hardware": "simulated; not run on a Mac", "bar_ms": BAR_MS}
    write({**record, "totals": found, "clean": clean, "overhead": costs, "runs": runs}, asked.output)
    print(markdown(found, first="fault"))
    print(f"\n{clean['alarms']} alarms in {clean['steps']:,} steps without a fault\n")
    print(
        markdown({f"{c.pop('blocks')} blocks, {c.pop('micro-batches')} micro-batches": c for c in costs}, first="step")
    )
    missed = [
        found[kind] for kind in KINDS if found[kind]["runs with an undetected fault"] or found[kind]["weights differ"]
    ]
    return int(bool(missed) or clean["alarms"] > 0 or max(c["checks_ms"] for c in costs) > BAR_MS)


if __name__ == "__main__":
    sys.exit(main())
