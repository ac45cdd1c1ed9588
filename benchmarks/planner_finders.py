"""How soon training begins inside a limit: seconds and samples from `fit()` to the first optimizer step that is kept, ours and the finders'.

    python benchmarks/planner_finders.py [--device cuda] [--repeats 2] [--output FILE]

The same module, the same data, the same limit (60 % of what the undivided batch takes), each in a fresh process, one after the other:
`UnifiedStrategy(micro_batch_size="auto")`, the same without a plan (its recovery alone), Lightning's `BatchSizeFinder` by powers and by
bisection, and Accelerate's `find_executable_batch_size` around a plain loop. Ours trains with the batch that was asked for, in parts;
the others make the batch smaller. A step is kept if the run that it belongs to goes on: steps of trials that are thrown away, and of
attempts that run out of memory, count as samples and as time. Samples are rows that went through the network, of any kind of step.
"""

import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from planner.limited import PRECISION, Limit, budget_of, limits_of_process, unlimited
from planner.modules import MODULES
from planner.pool import Task, run_all
from planner.recording import begin, parser
from planner.tables import gib, table

from lightning_unified import UnifiedStrategy

CHOSEN = {"cpu": ("mlp", "gearhead-small"), "cuda": ("mlp", "gearhead-34m", "bert-like")}
BATCHES = 4  # times the larger of the module's two batch sizes
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
    """The rows of one batch over and over; handed out as whole batches, so that no time goes into putting them together."""

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
    """Notes when the first optimizer step of the run that goes on is done; finders' trials run without callbacks."""

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


def measured(name: str, device: str, rows: int, limit: int, method: str) -> dict[str, Any]:
    """Return how long `method` takes to its first kept step, in the limit."""
    if method == METHODS[-1] and find_spec("accelerate") is None:
        return {"status": "not installed"}
    kind, clock = MODULES[name], Clock()
    batch = kind.batch(device, rows)
    with limits_of_process(name, device, limit):
        if device == "cuda" and not method.startswith(METHODS[:2]):
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        began = time.perf_counter()
        try:
            run = _by_accelerate if method == METHODS[-1] else _by_trainer
            found = {"status": "trained", **run(name, device, batch, limit, method, clock)}
        except Exception as error:
            found = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    if clock.first is not None and clock.samples is not None:
        found |= {"seconds": round(clock.first - began, 3), "samples": clock.samples, "calls": len(clock.sizes)}
    return found | {"batch": rows, "largest_call": max(clock.sizes, default=None), "last_call": clock.sizes[-1:]}


def _by_trainer(
    name: str, device: str, batch: dict[str, torch.Tensor], limit: int, method: str, clock: Clock
) -> dict[str, Any]:
    module = MODULES[name].build(device)
    clock.watch(_net(module))
    rows = len(next(iter(batch.values())))
    budget = budget_of(device, limit)
    callbacks: list[L.Callback] = [clock]
    strategy, size = "auto", 2
    if method in METHODS[:2]:
        strategy, size = UnifiedStrategy(budget=budget, predict=method == METHODS[0]), rows
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
    return {"batch_of_a_step": data.batch_size, "recoveries": getattr(trainer.strategy, "recoveries", None)}


def _net(module: L.LightningModule) -> torch.nn.Module:
    return module.network if hasattr(module, "network") else module.net


def _by_accelerate(
    name: str, device: str, batch: dict[str, torch.Tensor], _limit: int, _method: str, clock: Clock
) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    rows, tried = len(next(iter(batch.values()))), []

    @find_executable_batch_size(starting_batch_size=rows)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        clock.first = None
        module = MODULES[name].build(device).to(device)
        clock.watch(_net(module))
        optimizer = module.configure_optimizers()
        loader = iter(Data(batch, batch_size).train_dataloader())
        for _ in range(STEPS):
            part = {key: value.to(device) for key, value in next(loader).items()}
            with torch.autocast(device, torch.bfloat16, enabled=PRECISION[device] == "bf16-mixed"):
                prepare = getattr(module, "prepare_batch", None)
                loss = module.training_step(part if prepare is None else prepare(part), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.first is None:
                clock.note()
        return batch_size

    return {"batch_of_a_step": train(), "tried": tried}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return, by module and method, the median seconds and samples, and how many runs trained on."""
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


def main() -> int:
    arguments = parser(__doc__, name="planner_finders", jobs=1)
    arguments.add_argument("--repeats", type=int, default=2, help="runs of each method (default: 2)")
    options = arguments.parse_args()
    record, device = begin(
        options, what="seconds and samples to the first kept optimizer step", summarise=summarise, tables=tables
    )
    keys = {
        f"{options.device} | {name} | {method} | run {run}": (name, method)
        for name in CHOSEN[options.device]
        for run in range(1, options.repeats + 1)
        for method in METHODS
    }
    wanted = [key for key in keys if options.only in key and record.lacks(key, again=options.again)][: options.limit]
    rows: dict[str, dict[str, Any]] = {}

    def done(task: Task, result: dict[str, Any]) -> Iterable[Task]:
        if task.name not in rows:
            return _limited(task.name, result, {key: keys[key] for key in wanted}, rows, options.device)
        record.add({**rows[task.name], "result": result})
        return []

    names = dict.fromkeys(keys[key][0] for key in wanted)
    free = [
        Task(name=name, work=unlimited, args=(name, options.device, _batch(name, options.device))) for name in names
    ]
    run_all(free, jobs=options.jobs, done=done, capacity=device["capacity"], start=device["start"])
    print("\n\n".join(["", *tables(list(record.rows.values()))]))
    return 0


def _batch(name: str, device: str) -> int:
    return BATCHES * MODULES[name].size(device).rows[1]


def _limited(
    name: str, free: dict[str, Any], keys: dict[str, tuple[str, str]], rows: dict[str, dict[str, Any]], device: str
) -> Iterable[Task]:
    """Yield the runs of the module `name`, now that it is known what it takes without a limit."""
    for key, (module, method) in keys.items():
        if module == name:
            budget = int(SHARE * free["reserved"])
            rows[key] = {"cell": key, "module": name, "method": method, "device": device, "budget": budget}
            yield Task(name=key, work=measured, args=(name, device, _batch(name, device), budget, method))


if __name__ == "__main__":
    sys.exit(main())
