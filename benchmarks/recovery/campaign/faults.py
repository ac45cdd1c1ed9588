"""Inject faults into a run: missing memory, signals and full disks, each at its own point."""

import io
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.recovery.campaign.fault_kinds import STEP_POINTS, Fault, raise_out_of_memory
from benchmarks.recovery.campaign.training import write_past_limit
from lightning_unified.callbacks import PressureGuard
from lightning_unified.callbacks.checkpoint import files
from lightning_unified.hardware import Figure, Pressure
from lightning_unified.hardware.pressure.reader import Level
from lightning_unified.hardware.simulated import Abort

__all__ = ["STRIKES", "Disturbance", "Felt"]

_TO_THE_NEXT_WAIT = 10**9  # operations
STRIKES = "strikes"  # a file with one letter for each fault that struck

# Beside the callbacks: the strategy puts a callback's own attributes back when it undoes a step, and the faults would happen for ever.
_LEDGERS: "WeakKeyDictionary[Disturbance, tuple[dict[Fault, int], dict[Fault, int]]]" = WeakKeyDictionary()


class Disturbance(L.Callback):
    """Lets faults happen in one fit.

    Args:
        faults: What, where and when.
        wall: Rows from which on a part does not fit, between two batches: (rows, first batch, batch after the last).
        text: What the wall says.
        limit: Bytes that the address space may grow by from the first batch on (RLIMIT_AS), or None.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        *,
        wall: tuple[int, int, int] | None = None,
        text: str = "cpu",
        limit: int | None = None,
    ) -> None:
        self._faults, self._wall, self._text, self._limit = faults, wall, text, limit
        _LEDGERS[self] = (dict.fromkeys(faults, 0), dict.fromkeys(faults, 0))
        self._batch = -1
        self._undo: list[Callable[[], Any]] = []
        for point in STEP_POINTS:
            if point.startswith("on_"):
                setattr(self, point, lambda *_, point=point: self._pass(point))

    @property
    def _passed(self) -> dict[Fault, int]:
        """How often each fault's point has been passed."""
        return _LEDGERS[self][0]

    @property
    def struck(self) -> dict[Fault, int]:
        """How often each fault has happened."""
        return _LEDGERS[self][1]

    def setup(self, trainer, pl_module, stage):
        path = Path(trainer.default_root_dir) / STRIKES
        self._strikes = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        points = {fault.point for fault in self._faults}
        if any(fault.what == "gpu" for fault in self._faults):
            self._queue = trainer.strategy.simulated.command_queue
        for name in ("prepare", "loss_weight"):
            if name in points and hasattr(pl_module, name):
                setattr(pl_module, name, self._guarded(getattr(pl_module, name), name))
        if self._wall is not None:
            pl_module.training_step = self._walled(pl_module.training_step)
        if "save" in points:
            torch.save = self._saving(torch.save)
        if "save operation" in points:
            trainer.save_checkpoint = self._operated(trainer.save_checkpoint)
        for name in ("publish", "share", "remove"):
            if f"save: {name}" in points:
                setattr(files, name, self._guarded(getattr(files, name), f"save: {name}"))

    def on_train_start(self, trainer, pl_module):
        if self._limit is not None:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + self._limit,) * 2)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch = trainer.fit_loop.total_batch_idx
        for fault in self._faults:
            if fault.point == "any file":
                self._fill_disk(fault, full=fault.batch <= self._batch < fault.batch + fault.times)
        for fault in self._due("training"):
            if fault.point == "forward":
                layer = list(pl_module.net.children())[self._batch % len(list(pl_module.net.children()))]
                self._undo.append(layer.register_forward_hook(lambda *_: self._pass("forward")).remove)
            elif fault.point == "backward":
                weight = list(pl_module.net.parameters())[self._batch % 2]
                self._undo.append(weight.register_hook(lambda *_: self._pass("backward")).remove)
            elif fault.point in {"before_weights", "between_groups"}:
                at = 0 if fault.point == "before_weights" else 1
                self._undo.append(_watch_group(trainer.optimizers[0], at, partial(self._pass, fault.point)))
            elif fault.point == "operation":
                self._watch_operations("operation")

    def on_train_batch_end(self, trainer, *_):
        self._leave()
        for fault in self._faults:
            if fault.point == "end of batch" and fault.batch == self._batch:
                self._note(fault)
                getattr(trainer.strategy, fault.what)("as the campaign says")

    def on_validation_start(self, trainer, pl_module):
        points = {fault.point for fault in self._due("validation")}
        if "validation" in points:
            layer = list(pl_module.net.children())[-1]
            self._undo.append(layer.register_forward_hook(lambda *_: self._pass("validation")).remove)

    def on_validation_batch_start(self, *_):
        if any(fault.point == "validation operation" for fault in self._due("validation")):
            self._watch_operations("validation operation")

    def on_validation_batch_end(self, *_):
        if any(fault.point == "validation operation" for fault in self._faults):
            self._leave()  # what follows is the loader's

    def on_validation_end(self, *_):
        self._leave()

    def on_exception(self, *_):
        self._leave()

    def on_save_checkpoint(self, *_):
        self._pass("save: gather")

    def _fill_disk(self, fault: Fault, *, full: bool) -> None:
        if full and not self.struck[fault]:
            self._note(fault)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write says EFBIG, as a full disk says ENOSPC
        if self.struck[fault]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _watch_operations(self, point: str) -> None:
        mode = _Operations(partial(self._pass, point))
        mode.__enter__()
        self._undo.append(partial(mode.__exit__, None, None, None))

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _due(self, where: str) -> list[Fault]:
        """Return the faults that are still to come and whose batch it is."""
        left = [fault for fault in self._faults if self.struck[fault] < fault.times]
        if where == "training":
            return [fault for fault in left if fault.batch == self._batch and fault.point in STEP_POINTS]
        return [fault for fault in left if fault.batch <= self._batch and fault.point.startswith(where)]

    def _pass(self, point: str) -> None:
        """Count a passage of `point`; strike if it is the one, or one right after it."""
        where = "training" if point in STEP_POINTS else point
        for fault in self._due(where):
            if fault.point == point:
                self._passed[fault] += 1
                if self._passed[fault] >= fault.nth:
                    self._note(fault)
                    if fault.what == "gpu":
                        self._queue.abort(Abort(after=0, operations=_TO_THE_NEXT_WAIT, says=False))
                    else:
                        fault.strike()

    def _note(self, fault: Fault) -> None:
        """Count it, also in a file: a signal may end this process."""
        self.struck[fault] += 1
        write_past_limit(self._strikes, b"x")

    def _guarded(self, function: Callable, point: str) -> Callable:
        def guarded(*args, **kwargs):
            self._pass(point)
            return function(*args, **kwargs)

        return guarded

    def _walled(self, training_step: Callable) -> Callable:
        rows, first, end = self._wall or (0, 0, 0)

        def walled(batch, *args):
            outputs = training_step(batch, *args)
            if first <= self._batch < end and len(batch["id"]) > rows:
                write_past_limit(self._strikes, b"x")
                raise_out_of_memory(self._text)
            return outputs

        return walled

    def _operated(self, save: Callable) -> Callable:
        def operated(*args, **kwargs):
            with _Operations(partial(self._pass, "save operation")):
                return save(*args, **kwargs)

        return operated

    def _saving(self, save: Callable) -> Callable:
        def saving(obj, file, *args, **kwargs):
            fault = next((fault for fault in self._due("save") if fault.point == "save"), None)
            if fault is None or not isinstance(file, io.IOBase):
                return save(obj, file, *args, **kwargs)
            self._note(fault)
            if fault.what == "file limit":
                return _limited(lambda: save(obj, file, *args, **kwargs), fault.nth)
            return save(obj, _Striking(file, fault), *args, **kwargs)

        return saving


def _watch_group(optimizer: torch.optim.Optimizer, at: int, passed: Callable[[], None]) -> Callable[[], Any]:
    """Call `passed` once group number `at` has state; return the function that ends this.

    Torch's optimizers create a group's state before they write its weights. They finish one group before the next.
    """
    make_state, group = optimizer._init_group, optimizer.param_groups[at]

    def watched(current, *args, **kwargs):
        result = make_state(current, *args, **kwargs)
        if current is group:
            passed()
        return result

    optimizer._init_group = watched
    return lambda: optimizer.__dict__.pop("_init_group", None)


def _limited(write: Callable[[], Any], size: int) -> Any:
    """Run `write` while no file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write says EFBIG, as a full disk says ENOSPC
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        return write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class Felt(PressureGuard):
    """Feels a pressure that is made up: `level` from one batch to another, and none otherwise."""

    def __init__(self, spans: tuple[tuple[int, int, Level], ...], *, stop: bool) -> None:
        super().__init__(every_s=0.001, samples=2, stop=stop)
        self._spans, self._at = spans, -1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._at = trainer.fit_loop.total_batch_idx

    def reader(self):
        return lambda: self._pressure(
            next((span[2] for span in self._spans if span[0] <= self._at < span[1]), "normal")
        )

    @staticmethod
    def _pressure(level: Level) -> Pressure:
        reasons = () if level == "normal" else (f"the campaign says {level}",)
        return Pressure(
            level=level,
            available=Figure(None, "unknown: made up"),
            swap_out_bytes_per_s=None,
            stall_share=None,
            reasons=reasons,
        )


class _Striking:
    """A file that lets a fault strike once more than `nth` bytes have been written to it."""

    def __init__(self, file: Any, fault: Fault) -> None:
        self._file, self._fault, self._written, self._armed = file, fault, 0, True

    def write(self, data: Any) -> int:
        self._written += len(data)
        if self._armed and self._written >= self._fault.nth:
            self._armed = self._fault.what == "disk"  # a full disk stays full
            self._fault.strike()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Operations(TorchDispatchMode):
    """Calls `passes` at each operation that makes a tensor.

    Only such an operation can run out of memory.
    """

    def __init__(self, passes: Callable[[], None]) -> None:
        super().__init__()
        self._passes = passes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(result.alias_info is None for result in func._schema.returns):
            self._passes()
        return func(*args, **(kwargs or {}))
