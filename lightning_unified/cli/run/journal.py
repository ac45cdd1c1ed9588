"""Events of a run, appended to `events.jsonl` as they happen.

A killed run leaves them too.
"""

import json
import logging
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_unified.callbacks.device_pool import pool_of
from lightning_unified.callbacks.loops import is_trial, logged_step
from lightning_unified.cli.run.json_files import plain, versions
from lightning_unified.cost_model import static_bytes
from lightning_unified.hardware import Sources, read, watermarks

__all__ = ["JOURNAL", "Journal"]

JOURNAL = "events.jsonl"

log = logging.getLogger("lightning_unified")


class Journal(Callback):
    """Append a run's start, the strategy's events and the end to `events.jsonl`.

    Each line has `time` (ISO 8601, UTC), `step` (under which metrics of the batch are logged), `kind`, `text`, and the state of the run:
    `micro_batch_size`, `recoveries` of this process so far, `budget_bytes`. A resumed run appends its own lines.

    Kinds: `began` (with `machine`: device, pool, watermarks, versions and `held`, the bytes of weights, gradients, optimizer state and
    buffers; and the `plan` so far), `event`, `ended`, `failed` (with the `plan`).
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._written = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keeps = trainer.is_global_zero and not is_trial(trainer) and "://" not in str(trainer.default_root_dir)
        self._path, self._written = Path(trainer.default_root_dir) / JOURNAL if keeps else None, 0
        if keeps:
            self._write(
                trainer,
                "began",
                f"{type(pl_module).__name__} begins",
                machine=_machine(trainer, pl_module),
                plan=_plan(trainer),
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._catch_up(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._catch_up(trainer)
        self._write(trainer, "ended", f"ended after step {trainer.global_step}")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._catch_up(trainer)
        said = (str(exception).splitlines() or [""])[0]
        self._write(
            trainer,
            "failed",
            f"{type(exception).__name__}: {said}" if said else type(exception).__name__,
            plan=_plan(trainer),
        )

    def _catch_up(self, trainer: Trainer) -> None:
        events = getattr(trainer.strategy, "events", [])
        while self._written < len(events):
            self._written += 1
            self._write(trainer, "event", events[self._written - 1])

    def _write(self, trainer: Trainer, kind: str, text: str, **more: Any) -> None:
        if self._path is None:
            return
        strategy = trainer.strategy
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            # A resumed run does not know its logged step yet.
            "step": trainer.global_step if kind == "began" else logged_step(trainer),
            "kind": kind,
            "text": text,
            "micro_batch_size": getattr(strategy, "micro_batch_size", None),
            "recoveries": getattr(strategy, "recoveries", None),
            "budget_bytes": getattr(getattr(strategy, "budget", None), "bytes", None),
            **more,
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(line)) + "\n")
        except OSError as error:
            log.warning("Events of this run are no longer written to %s: %s", self._path, error)
            self._path = None


def _plan(trainer: Trainer) -> dict[str, Any] | None:
    """Return the plan so far. `plan.json` is written at the end, which a failed run does not reach."""
    if getattr(trainer.strategy, "budget", None) is None:  # the run failed before the strategy was set up
        return None
    plan = getattr(trainer.strategy, "plan", None)
    return None if plan is None else plan.to_dict()


def _machine(trainer: Trainer, module: LightningModule) -> Mapping[str, Any]:
    """Return the machine's figures and versions, None where unknown."""
    device, sources = pool_of(trainer)
    reading = read(device, sources=sources)
    budget = getattr(trainer.strategy, "budget", None)
    marks = None if budget is None else watermarks(budget, reading, (sources or Sources.live()).environ)
    return {
        "device": getattr(trainer.strategy, "told_device", reading.device),
        "name": reading.name,
        "pool": reading.pool,
        "total_bytes": reading.total.bytes,
        "available_bytes": reading.available.bytes,
        "high_bytes": None if marks is None else marks.high,
        "low_bytes": None if marks is None else marks.low,
        "processes": trainer.world_size,
        "system": platform.platform(),
        "versions": versions(),
        "held": static_bytes(module, trainer.optimizers),
    }
