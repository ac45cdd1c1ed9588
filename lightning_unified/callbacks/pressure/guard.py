"""`PressureGuard`: react to memory pressure in steps, from clearing caches to stopping the run."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_unified.callbacks.device_pool import pool_of, simulated_by, simulated_pressure
from lightning_unified.callbacks.loops import is_trial, will_stop, window_is_open
from lightning_unified.callbacks.pressure.rungs import (
    FILE,
    Direction,
    Rung,
    checkpoint,
    clear,
    direction_of,
    grow,
    shrink,
)
from lightning_unified.callbacks.pressure.thrash_watch import ThrashWatch
from lightning_unified.callbacks.pressure.watch import PressureTrace, PressureWatch, Verdict
from lightning_unified.callbacks.ranks.agreement import first_text, most
from lightning_unified.callbacks.stopping import restore_limits, stop_cleanly
from lightning_unified.errors import ConfigurationError, check_count
from lightning_unified.hardware import Budget, Pressure, PressureReader, Sources, read
from lightning_unified.units import format_bytes

__all__ = ["PressureGuard"]

log = logging.getLogger("lightning_unified")

_STOPPED = 'Stopped after step %s: %s. Saved %s\nGo on with: trainer.fit(module, ckpt_path="%s")'


class PressureGuard(Callback):
    """Give memory back in rungs, one per batch, while the operating system reports memory pressure.

    1. Log a warning.
    2. Clear caches.
    3. Shrink the micro-batch, if the strategy has `shrink(reason) -> bool`. On the way down `grow(reason) -> bool` undoes it.
    4. Save a checkpoint.
    5. Stop as after a signal.

    A thread samples the system's level. The guard acts at the ends of batches only; it saves or stops only with no accumulation
    window open. A rung that cannot be taken is logged and skipped.

    A warning level needs `samples` samples in a row for the first rung and five new ones for each further rung. It never stops the
    run, because a laptop may warn for hours. A critical level needs `samples` new samples for each rung, up to the stop. Five normal
    samples lead down one rung, so returning pressure continues at the current rung. Unknown samples count as neither.

    Steps that take three times as long as before, while memory is paged, are thrashing. The guard then logs one message with
    advice, and every sample counts as critical until a step is quick again.

    The training result stays the same. With several processes, pressure on one makes all act after the same batch.

    Args:
        every_s: Seconds between samples.
        samples: Number of equal samples in a row that make a level certain.
        trace: File with one JSON line per change and action, flushed to the disk; default `pressure.jsonl` in the trainer's
            `default_root_dir`. A run without pressure and with a constant budget writes none.
        stop: Whether to take the last rung.

    Attributes:
        stopped_for: The reason why the last `fit` was stopped, or None.

    Raises:
        ConfigurationError: If `every_s` or `samples` is out of range.
    """

    def __init__(
        self, *, every_s: float = 1.0, samples: int = 2, trace: str | Path | None = None, stop: bool = True
    ) -> None:
        if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not every_s > 0:
            raise ConfigurationError(f"PressureGuard: every_s={every_s!r}: give seconds, more than 0.")
        check_count("PressureGuard: samples", samples)
        self.every_s = every_s
        self.samples = samples
        self.stop = stop
        self.stopped_for: str | None = None
        self._given = trace
        self._watch: PressureWatch | None = None
        self._steps = ThrashWatch()
        self._budget: Budget | None = None
        self._one_pool = self._has_named_thrashing = False
        self._trace = PressureTrace(None)
        self._rung, self._acted_at = Rung.NONE, 0
        self._has_warned = False
        self._saved = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy's state in another process: options, results, no samples, no writes."""
        return {**vars(self), "_watch": None, "_steps": ThrashWatch(), "_trace": PressureTrace(None)}

    def reader(self) -> Callable[[], Pressure]:
        """Return a function that takes a sample; tests override this method."""
        reader = PressureReader(Sources.live(), one_pool=self._one_pool)
        return lambda: reader.read(time.monotonic())

    def thrash_watch(self) -> ThrashWatch:
        """Return the object that times the batches of a fit; tests override this method."""
        return ThrashWatch()

    @property
    def pressure_level(self) -> str:
        """The newest sample's level; "unknown" outside `fit`."""
        return "unknown" if self._watch is None else self._watch.verdict.pressure.level

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        path = Path(self._given or Path(trainer.default_root_dir) / "pressure.jsonl")
        self._trace = PressureTrace(path if trainer.is_global_zero and not is_trial(trainer) else None)
        self.stopped_for, self._has_warned, self._saved = None, False, ""
        self._rung, self._acted_at = Rung.NONE, 0
        machine, (device, _) = simulated_by(trainer), pool_of(trainer)
        reading = partial(read, device) if machine is None else machine.reading
        self._one_pool = device.type == "cuda" and reading().pool == "unified"
        self._budget, self._has_named_thrashing = getattr(trainer.strategy, "budget", None), False
        self._steps = self.thrash_watch()
        sample = self.reader() if machine is None else simulated_pressure(machine, one_pool=self._one_pool)
        self._watch = PressureWatch(sample, every_s=self.every_s, samples=self.samples, trace=self._trace)
        self._watch.start()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._steps.began()
        self._trace.step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        watch = self._watch
        if watch is None:
            return
        verdict = watch.verdict
        self._judge_step(trainer, batch, watch)
        self._tell_strategy(trainer, verdict)
        own = direction_of(verdict, rung=self._rung, acted_at=self._acted_at, samples=self.samples)
        asked = _agreed(trainer, own)
        if asked == Direction.STAY or trainer.should_stop or will_stop(trainer):
            return
        top = Rung.STOP if asked == Direction.UP_TO_STOP and self.stop else Rung.CHECKPOINT
        if asked == Direction.DOWN:
            self._trace.write(verdict.pressure, self._down(trainer))
        elif not self._climb(trainer, top, verdict.pressure, pressed=own == asked):
            return
        self._acted_at = watch.verdict.index

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()
        restore_limits(trainer)
        if self.stopped_for is not None and trainer.is_global_zero:
            log.warning(_STOPPED, trainer.global_step, self.stopped_for, self._saved, self._saved)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()
        restore_limits(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def _judge_step(self, trainer: Trainer, batch: Any, watch: PressureWatch) -> None:
        """Check the batch's time for thrashing; thrashing makes samples critical and is logged once."""
        thrash = self._steps.ended(trainer, batch, watch.verdict.pressure)
        if watch.thrashing and thrash is None:
            self._acted_at = watch.verdict.index  # ignore samples from during the quick step
        watch.thrashing = "" if thrash is None else thrash.reason
        if thrash is not None and not self._has_named_thrashing:
            self._has_named_thrashing = self._has_warned = True
            log.warning("%s", self._steps.advice(thrash, trainer.strategy.root_device))

    def _tell_strategy(self, trainer: Trainer, verdict: Verdict) -> None:
        """Report pressure to the strategy's cache policy, and write a changed budget to the trace."""
        feel = getattr(trainer.strategy, "feel_pressure", None)
        if feel is not None:
            feel(verdict.pressed >= self.samples)
        budget = getattr(trainer.strategy, "budget", None)
        if budget is not None and budget is not self._budget:
            self._budget = budget
            self._trace.write(verdict.pressure, f"budget now {format_bytes(budget.bytes)}: {budget.reason}")

    def _climb(self, trainer: Trainer, top: Rung, pressure: Pressure, *, pressed: bool) -> bool:
        """Take the next rung that any process can take, outside of windows; return whether one was taken."""
        if self._rung >= top:
            return False
        said = first_text(trainer, "; ".join(pressure.reasons) or "no reason was read" if pressed else "")
        reason = f"memory pressure: {said}"
        actions = {
            Rung.WARN: partial(self._say, trainer, reason),
            Rung.CLEAR: partial(clear, trainer),
            Rung.SHRINK: partial(shrink, trainer, reason),
            Rung.CHECKPOINT: partial(checkpoint, trainer),
            Rung.STOP: partial(self._end_run, trainer, reason),
        }
        while self._rung < top:
            following = Rung(self._rung + 1)
            if following >= Rung.CHECKPOINT and window_is_open(trainer):
                return False
            taken, text = actions[following]()
            taken = bool(most(trainer, int(taken)))
            self._rung = following
            self._trace.write(pressure, text if pressed else f"{text} ({reason})")
            if taken:
                return True
            log.warning("%s", text)
        return False

    def _down(self, trainer: Trainer) -> str:
        """Go down one rung, undo its action if possible, and return a description."""
        left, self._rung = self._rung, Rung(self._rung - 1)
        return f"down to rung {self._rung:d} of {Rung.STOP:d}" + (grow(trainer) if left == Rung.SHRINK else "")

    def _say(self, trainer: Trainer, reason: str) -> tuple[bool, str]:
        if not self._has_warned and trainer.is_global_zero:
            log.warning("The machine is running short of memory (%s). The run frees memory where it can.", reason)
        self._has_warned = True
        return True, "warned"

    def _end_run(self, trainer: Trainer, reason: str) -> tuple[bool, str]:
        if is_trial(trainer):
            return False, "stop skipped: fast_dev_run ends soon"
        self.stopped_for = reason
        self._saved = stop_cleanly(trainer, otherwise=FILE)
        return True, f"stopped at step {trainer.global_step}, state in {self._saved}"


def _agreed(trainer: Trainer, asked: Direction) -> int:
    """Return the strongest direction that any process calls for."""
    if trainer.world_size == 1:
        return asked
    return most(trainer, asked - Direction.DOWN) + Direction.DOWN
