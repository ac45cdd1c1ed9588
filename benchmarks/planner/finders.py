"""Measure how soon training begins inside a limit: our planner beside batch-size finders.

Compared are seconds and samples from `fit()` to the first optimizer step that is kept.

    python -m benchmarks.planner.finders [--device cuda] [--jobs 3] [--repeats 3] [--output FILE]

The same module, the same data, the same limit (60 % of what the undivided batch takes), each in a fresh process, one after the other:
`UnifiedStrategy(micro_batch_size="auto")`, the same without a plan (its recovery alone), Lightning's `BatchSizeFinder` by powers and by
bisection, and Accelerate's `find_executable_batch_size` around a plain loop. Ours trains with the batch that was asked for, in
micro-batches; the others make the batch smaller. A step is kept if the run that it belongs to goes on: steps of trials that are thrown
away, and of attempts that run out of memory, count as samples and as time. Samples are rows that went through the network, of any kind
of step.

Processes are spawned, as a user's is: a fork of one that holds much copies it when it collects garbage, seconds that no user waits. With
`--jobs` several begin at a time and measure one after the other; one that begins makes its CUDA context, for which the others' calls
may wait, so that one job at a time is the fairer measure. The first process of a machine reads libraries from its disk, seconds
again: the median of the repeats is reported, and every other one goes backwards.
"""

import contextlib
import copy
import fcntl
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.planner.harness.limited import PRECISION, Limit, budget_of, limits_of_process, unlimited
from benchmarks.planner.harness.pool import Task
from benchmarks.planner.harness.recording import Record, measure, parser
from benchmarks.planner.harness.tables import gib, table
from benchmarks.planner.zoo.modules import MODULES
from lightning_unified import UnifiedStrategy
from lightning_unified.step.split.rules import rules_of

CHOSEN = {"cpu": ("mlp", "gearhead-small"), "cuda": ("mlp", "gearhead-34m", "bert-like")}
BATCHES = 2  # times the larger of the module's two batch sizes
SHARE = 0.6
STEPS = 4
METHODS = (
    "planned",
    "recovery alone",
    "BatchSizeFinder, power",
    "BatchSizeFinder, binsearch",
    "find_executable_batch_size",
)


class Rows(torch.utils.data.Dataset):
    """The rows of one batch over and over.

    They are handed out as whole batches, so that no time goes into putting them together.
    """

    def __init__(self, batch: dict[str, torch.Tensor], times: int) -> None:
        self._batch, self._times = batch, times

    @property
    def rows(self) -> int:
        return len(next(iter(self._batch.values())))

    def __len__(self) -> int:
        return self._times * self.rows

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        chosen = torch.tensor(indices) % self.rows
        return {name: column[chosen] for name, column in self._batch.items()}


class Data(L.LightningDataModule):
    """Batches of a size that a finder may set."""

    def __init__(self, batch: dict[str, torch.Tensor], batch_size: int) -> None:
        super().__init__()
        self._rows, self.batch_size = Rows(batch, 64), batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self._rows, batch_size=self.batch_size, collate_fn=lambda batch: batch)

    def val_dataloader(self):
        return []  # BatchSizeFinder asks for one, whether it is used or not


class Clock(L.Callback):
    """Notes when the first optimizer step of the run that goes on is done.

    Finders' trials run without callbacks.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.samples: int | None = None
        self.seen = 0
        self.sizes: list[int] = []

    def watch(self, net: torch.nn.Module) -> None:
        net.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, net, args, kwargs):
        first = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        if type(first) is torch.Tensor and first.device.type != "meta":  # not a fake one, of a plan
            self.seen += len(first)
            self.sizes.append(len(first))

    def on_train_batch_end(self, *_):
        if self.first is None:
            self.note()

    def note(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.first, self.samples = time.perf_counter(), self.seen


@contextlib.contextmanager
def alone(turn: str) -> Iterator[None]:
    """Wait until no other process measures, and let none begin."""
    with open(turn, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free(name: str, device: str, rows: int, turn: str) -> dict[str, Any]:
    """Return what the undivided batch takes."""
    with alone(turn):
        return unlimited(name, device, rows)


def measured(name: str, device: str, rows: int, limit: int, method: str, turn: str) -> dict[str, Any]:
    """Return how long `method` takes to its first kept step, in the limit.

    The module is built before.
    """
    if method == METHODS[-1] and find_spec("accelerate") is None:
        return {"status": "not installed"}
    if device == "cuda":
        torch.zeros(1, device=device)  # the context
    with alone(turn):
        return _measured(name, device, rows, limit, method)


def _measured(name: str, device: str, rows: int, limit: int, method: str) -> dict[str, Any]:
    module, batch, clock = MODULES[name].build(device), MODULES[name].batch(device, rows), Clock()
    with limits_of_process(name, device, limit):
        if device == "cuda" and method not in METHODS[:2]:
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        run = _by_accelerate if method == METHODS[-1] else _by_trainer
        began = time.perf_counter()
        try:
            found = {"status": "trained", **run(module, device, batch, limit, method, clock)}
        except Exception as error:
            found = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    if clock.first is not None and clock.samples is not None:
        found |= {"seconds": round(clock.first - began, 3), "samples": clock.samples, "calls": len(clock.sizes)}
    return found | {"batch": rows, "largest_call": max(clock.sizes, default=None), "last_call": clock.sizes[-1:]}


def _by_trainer(
    module: L.LightningModule, device: str, batch: dict[str, torch.Tensor], limit: int, method: str, clock: Clock
) -> dict[str, Any]:
    clock.watch(_net(module))
    rows = len(next(iter(batch.values())))
    callbacks: list[L.Callback] = [clock]
    strategy, size = "auto", 2
    if method in METHODS[:2]:
        strategy, size = UnifiedStrategy(budget=budget_of(device, limit), predict=method == METHODS[0]), rows
        callbacks.append(Limit(limit))
    else:
        callbacks.append(BatchSizeFinder(mode=method.rpartition(" ")[2]))
    data = Data(batch, size)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else device,
        devices=1,
        precision=PRECISION[device],
        strategy=strategy,
        callbacks=callbacks,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    prediction = getattr(getattr(trainer.strategy, "plan", None), "prediction", None)
    planning = None if prediction is None else round(prediction.planning_seconds, 3)
    recoveries = getattr(trainer.strategy, "recoveries", None)
    return {"batch_of_a_step": data.batch_size, "recoveries": recoveries, "planning_seconds": planning}


def _net(module: L.LightningModule) -> torch.nn.Module:
    return module.network if hasattr(module, "network") else module.net


def _by_accelerate(
    built: L.LightningModule, device: str, batch: dict[str, torch.Tensor], _limit: int, _method: str, clock: Clock
) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    rows, tried = len(next(iter(batch.values()))), []

    @find_executable_batch_size(starting_batch_size=rows)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        clock.first = None
        module = copy.deepcopy(built).to(device)
        clock.watch(_net(module))
        optimizer = module.configure_optimizers()
        loader = iter(Data(batch, batch_size).train_dataloader())
        for _ in range(STEPS):
            part = {key: value.to(device) for key, value in next(loader).items()}
            with torch.autocast(device, torch.bfloat16, enabled=PRECISION[device] == "bf16-mixed"):
                prepare = rules_of(module, "fit").prepare
                loss = module.training_step(part if prepare is None else prepare(part), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.first is None:
                clock.note()
        return batch_size

    return {"batch_of_a_step": train(), "tried": tried}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median seconds and samples by module and method, and the finished runs."""
    found: dict[str, Any] = {}
    for row in rows:
        key = f"{row['module']}: {row['method']}"
        found.setdefault(key, []).append(row)
    return {key: _of_method(own) for key, own in found.items()}


def _of_method(own: list[dict[str, Any]]) -> dict[str, Any]:
    results = [row["result"] for row in own]
    timed = sorted(result["seconds"] for result in results if result.get("status") == "trained")
    best = next((result for result in results if result.get("status") == "trained"), results[0])
    return {
        "runs": len(own),
        "trained": len(timed),
        "status": best.get("status", best.get("error")),
        "seconds": timed[len(timed) // 2] if timed else None,
        "samples": best.get("samples"),
        "batch": best.get("batch_of_a_step"),
        "at_once": (best.get("last_call") or [None])[-1],
        "budget": own[0]["budget"],
    }


def tables(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for key, found in summarise(rows).items():
        name, _, method = key.partition(": ")
        seconds = None if found["seconds"] is None else f"{found['seconds']:.2f}"
        trained = f"{found['trained']} of {found['runs']}" if found["trained"] else str(found["status"])[:80]
        size, at_once = found["batch"], found["at_once"]
        lines.append((name, gib(found["budget"]), method, trained, seconds, found["samples"], size, at_once))
    heads = (
        "module",
        "limit, GiB",
        "method",
        "trained",
        "seconds to the first kept step",
        "samples",
        "batch",
        "at once",
    )
    return [table(heads, lines)]


class Progress:
    """Lets each method begin in the limit of its module.

    The limit is known once the module has run without one.

    Args:
        record: Where finished rows go.
        options: Of the command line.
    """

    def __init__(self, record: Record, options: Namespace) -> None:
        self._record, self._device = record, options.device
        keys = {
            f"{self._device} | {name} | {method} | run {run}": (name, method)
            for run in range(1, options.repeats + 1)
            for name in CHOSEN[self._device]
            for method in METHODS[:: 1 if run % 2 else -1]
        }
        lacking = [key for key in keys if options.only in key and record.lacks(key, again=options.again)]
        self._wanted = {key: keys[key] for key in lacking[: options.limit]}
        self._rows: dict[str, dict[str, Any]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="finders-")
        self._turn = f"{self._folder.name}/turn"

    def begin(self) -> list[Task]:
        """Return the fits without a limit of the modules whose limit the record does not tell."""
        tasks: list[Task] = []
        for name in dict.fromkeys(name for name, _ in self._wanted.values()):
            known = next((row["budget"] for row in self._record.rows.values() if row["module"] == name), None)
            if known is None:
                tasks.append(
                    Task(
                        name=f"free: {name}",
                        work=free,
                        args=(name, self._device, self._batch(name), self._turn),
                        seconds=900,
                    )
                )
            else:
                tasks += self._limited(name, known)
        return tasks

    def done(self, task: Task, result: dict[str, Any]) -> Iterable[Task]:
        step, _, key = task.name.partition(": ")
        if step == "free":
            return [] if "error" in result else self._limited(key, int(SHARE * result["reserved"]))
        self._record.add({**self._rows[key], "result": result})
        return []

    def _batch(self, name: str) -> int:
        return BATCHES * MODULES[name].size(self._device).rows[1]

    def _limited(self, name: str, budget: int) -> list[Task]:
        tasks = []
        for key, (module, method) in self._wanted.items():
            if module == name:
                row = {"cell": key, "module": name, "method": method, "device": self._device, "budget": budget}
                self._rows[key] = row
                args = (name, self._device, self._batch(name), budget, method, self._turn)
                tasks.append(Task(name=f"method: {key}", work=measured, args=args, seconds=900))
        return tasks


def main() -> int:
    arguments = parser(__doc__, name="finders", jobs=1)
    arguments.add_argument("--repeats", type=int, default=3, help="runs of each method (default: 3)")
    what = "seconds and samples to the first kept optimizer step"
    return measure(
        arguments.parse_args(), what=what, summarise=summarise, tables=tables, progress=Progress, start="spawn"
    )


if __name__ == "__main__":
    sys.exit(main())
