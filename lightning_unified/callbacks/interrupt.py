"""`GracefulInterrupt`: on a signal finish the step, save and stop.

On a second, stop at once.
"""

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_unified.callbacks.loops import call_off_validation, window_is_open
from lightning_unified.callbacks.ranks.agreement import most
from lightning_unified.callbacks.ranks.requeue import Requeue, requeue_of, signal_named
from lightning_unified.callbacks.stopping import kept_state, restore_limits, stop_cleanly
from lightning_unified.errors import RankError
from lightning_unified.terminal import say

__all__ = ["GracefulInterrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], Any] | int | None


class GracefulInterrupt(Callback):
    """Stop after the current step on the first SIGINT or SIGTERM, at once on the second.

    A clean stop skips validation (it leaves a running one), ignores minimums of steps and epochs, saves a checkpoint, and ends
    `fit` normally. With `RunCheckpoint` the checkpoint is its `last.ckpt`. Otherwise `interrupted.ckpt` in `default_root_dir` holds
    Lightning's state, which is not enough for a bit-exact resume.

    The second signal names the newest checkpoint, restores the handlers from before `fit` and raises the signal again under them.
    The first signal before the first batch does the same, because there is nothing to save.

    With several processes, a signal to one stops all after the same step; a running validation is finished.

    Lightning handles SIGTERM too, from the start of `fit` to its end: it raises at the end of a batch without a checkpoint. The
    handlers of this callback replace Lightning's while batches run. Outside the main thread Python allows no signal handlers; there
    the callback warns and does nothing.

    In a job of SLURM, the signal by which the scheduler announces the end of the job (`#SBATCH --signal=SIGUSR1@90`) is handled like
    SIGTERM, and the saved job is requeued by `scontrol requeue`. The handler of that signal only notes it. `SLURMEnvironment(auto_requeue=
    False)` among the Trainer's plugins switches this off. Repeated signals of the scheduler do not end the run at once; Ctrl-C does.

    Args:
        resume_command: The command to print for continuing; default is the line of Python with the checkpoint's path.
        requeue_signal: `SIGUSR1`, `SIGUSR2` or `SIGTERM`; default is that of the Trainer's `SLURMEnvironment`, or SIGUSR1.

    Attributes:
        signal: The signal that stopped the last `fit`: SIGINT, SIGTERM, the signal of a requeue, or None.
        is_forced: Whether a second signal ended it at once.
        is_requeued: Whether the job was put back into SLURM's queue.

    Raises:
        ConfigurationError: If `requeue_signal` names no signal that can be handled.

    Source:
        lightning/pytorch/trainer/connectors/signal_connector.py for when Lightning registers and restores handlers (2.6.6).
    """

    def __init__(self, *, resume_command: str | None = None, requeue_signal: str | None = None) -> None:
        if requeue_signal is not None:
            signal_named(requeue_signal)
        self.resume_command = resume_command
        self.is_requeued = False
        self._requeue_signal = requeue_signal
        self._requeue: Requeue | None = None
        self.signal: signal.Signals | None = None
        self.is_forced = False
        self._trainer: weakref.ref[Trainer] | None = None
        self._before: dict[signal.Signals, _Handler] = {}
        self._running = self._armed = False
        self._process = os.getpid()
        self._step_before = 0
        self._saved = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy in another process, which handles no signals there."""
        return {**vars(self), "_before": {}, "_running": False, "_armed": False, "_trainer": None, "_requeue": None}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.signal, self.is_forced, self._running, self._saved = None, False, False, ""
        self.is_requeued = False
        self._requeue = self.requeue(trainer)
        self._trainer = weakref.ref(trainer)
        self._process = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn(
                "GracefulInterrupt does nothing here: fit does not run in the main thread, the only one that may handle signals"
            )
            return
        self._armed = True
        # Install the handler now, so that loader workers forked before the first batch inherit one that ignores Ctrl-C.
        more = () if self._requeue is None else (self._requeue.signal,)
        self._before = {number: signal.getsignal(number) for number in dict.fromkeys((*_SIGNALS, *more))}
        self._install()

    def requeue(self, trainer: Trainer) -> Requeue | None:
        """Return how the job of this process is requeued, None if it is not; tests override this method."""
        return requeue_of(getattr(trainer.strategy, "cluster_environment", None), self._requeue_signal)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before:  # Lightning has just registered handlers, which broadcast, save and log inside of a handler
            self._install()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before:
            self._install()
            self._running = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_before = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not window_is_open(trainer) and self._is_asked(trainer):
            self._saved = stop_cleanly(trainer, otherwise="interrupted.ckpt")

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._running and self.signal is not None and trainer.world_size == 1:
            call_off_validation(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._running and not window_is_open(trainer) and self._is_asked(trainer):
            self._saved = stop_cleanly(trainer, otherwise="interrupted.ckpt")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._running = False
        restore_limits(trainer)
        if not self._saved or self.signal is None:
            return
        if trainer.is_global_zero:
            command = self.resume_command or f'trainer.fit(module, ckpt_path="{self._saved}")'
            say(
                f"Stopped by {self.signal.name} after step {trainer.global_step}. Saved {self._saved}\nGo on with: {command}"
            )
        if self._requeue is not None and self.signal == self._requeue.signal:
            self.is_requeued = self._requeue.ask_on_rank_0(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RankError) and exception.missing and self.resume_command is None:
            _write(kept_state(trainer, command=None).replace("Go on with:", "Go on, with fewer devices:"))
        self._running = False
        restore_limits(trainer)
        self._hand_back()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._running = False
        self._hand_back()

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _hand_back(self) -> None:
        """Restore the handlers from before `fit`, unless another handler has replaced ours."""
        self._armed = False
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked loader worker ends with its owner
        announced = None if self._requeue is None else self._requeue.signal
        if announced is not None and self._armed and number == announced:
            self.signal = self.signal or announced
            return
        if self._running and announced is not None and self.signal == announced and number == signal.SIGTERM:
            return  # the scheduler ends the job that this signal requeues; the run is saving already
        trainer = None if self._trainer is None else self._trainer()
        if self._running and self.signal is None:
            self.signal = signal.Signals(number)
            if trainer is None or trainer.is_global_zero:
                _write(f"{self.signal.name}: finishing this step, then saving. Once more to stop at once.")
            return
        if self._running and trainer is not None:
            self.is_forced = True
            if trainer.is_global_zero:
                kept = kept_state(trainer, command=self.resume_command)
                _write(f"{signal.Signals(number).name} again: stopping at once. {kept}")
        # Lightning's teardown after an exception restores this handler; it must not swallow signals then either.
        self._hand_back()
        signal.raise_signal(number)

    def _is_asked(self, trainer: Trainer) -> bool:
        """Return whether any process received a signal.

        All ranks agree on the answer and on the signal.
        """
        if trainer.world_size == 1:
            return self.signal is not None
        number = most(trainer, 0 if self.signal is None else int(self.signal))
        if number:  # else a signal that came while the ranks agreed waits for the next batch
            self.signal = signal.Signals(number)
        return bool(number)


def _write(text: str) -> None:
    """Write to standard error past Python's buffers: the signal may have interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
