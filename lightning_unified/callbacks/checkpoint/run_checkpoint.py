"""`RunCheckpoint`: step checkpoints, `last.ckpt` and `best.ckpt`, for bit-exact resumes."""

import math
from pathlib import Path
from typing import Any, Literal

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_unified.callbacks.checkpoint import random_state
from lightning_unified.callbacks.checkpoint.continuation import Continuation
from lightning_unified.callbacks.checkpoint.disk import check_disk
from lightning_unified.callbacks.checkpoint.files import BEST, LAST, CheckpointFiles
from lightning_unified.callbacks.loops import is_trial, validation_is_complete, validation_is_due, will_stop
from lightning_unified.errors import CheckpointError, ConfigurationError, check_count

__all__ = ["RunCheckpoint"]


class RunCheckpoint(Checkpoint):
    """Write `step_<n>.ckpt` every few steps and keep the newest, `last.ckpt` and `best.ckpt`.

    Deviations from Lightning's `ModelCheckpoint`:

    1. One write serves all names by hard links; two of `ModelCheckpoint` would write the whole state twice.
    2. A file due at a step with a validation is written after it, when best score, early stopping and schedulers are final.
    3. With any IO plugin, a name refers to a complete file only.
    4. A run resumed from any file continues bit for bit: the file also holds the random states of all ranks, and the gradients
       of an open accumulation window. For that, validation does not advance the random streams of training.

    A disk that cannot hold one file is refused before training. If a write fails later, the callback warns, training goes on, and earlier
    files stay. At the end of a run a failed write is an error, because the steps since the last good file would be lost.

    Args:
        dirpath: The folder; default `checkpoints` in the first logger's folder, or in `default_root_dir` without one.
        every_n_steps: Optimizer steps between two `step_<n>.ckpt`.
        keep: Number of `step_<n>.ckpt` to keep: the newest of this run.
        monitor: The metric that decides `best.ckpt`, read after each validation; None writes no `best.ckpt`.
        mode: Whether the best value of `monitor` is the smallest (`min`) or the largest (`max`).

    Raises:
        ConfigurationError: If an argument is out of its range.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        every_n_steps: int = 50,
        keep: int = 3,
        monitor: str | None = "val/loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__()
        check_count("RunCheckpoint: every_n_steps", every_n_steps)
        check_count("RunCheckpoint: keep", keep)
        if mode not in {"min", "max"}:
            raise ConfigurationError(f"mode={mode!r} is not known; use 'min' or 'max'.")
        self.every_n_steps, self.keep = every_n_steps, keep
        self.monitor, self.mode = monitor, mode
        self.best_model_score: float | None = None
        self._given = dirpath
        self._files = CheckpointFiles(keep=keep)
        self._saved_step: int | None = None
        self._step_before = 0
        self._validation_planned = self._deferred = self._requested = self._resumed = False
        self._before_validation: dict[str, Any] | None = None
        self._continuation = Continuation()

    @property
    @override
    def state_key(self) -> str:
        """The key of this callback's state.

        It is independent of arguments, so that a resume may change `every_n_steps`.
        """
        return "RunCheckpoint"

    @property
    def dirpath(self) -> Path:
        """The folder of the files, known once `fit` has begun."""
        return self._files.folder

    @property
    def last_model_path(self) -> str:
        """The newest file, or `""` while there is none; loggers and `Trainer` read this attribute."""
        return self._files.path_if_here(LAST)

    @property
    def best_model_path(self) -> str:
        """The file with the best `monitor`, or `""` while there is none.

        `Trainer(ckpt_path="best")` reads it.
        """
        return self._files.path_if_here(BEST)

    @property
    def saved_step(self) -> int | None:
        """The optimizer step of `last_model_path`, None while there is no file."""
        return self._saved_step if self.last_model_path else None

    def request(self) -> None:
        """Request a `last.ckpt` at the end of this batch.

        Call it from a callback's `on_train_batch_end`. All processes must request it after the same batch.
        """
        self._requested = True

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._continuation.forget()
        if isinstance(trainer.precision_plugin, DoublePrecision):
            pl_module.double()  # Lightning (2.6.6) converts the module only after it loaded the checkpoint, in float32
        folder = self._given or Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
        folder = Path(trainer.strategy.broadcast(str(folder)))
        self._files.open(folder, cleans=stage == "fit" and trainer.is_global_zero)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best_score": self.best_model_score, "kept": list(self._files.kept)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_score = state_dict["best_score"] if state_dict["monitor"] == self.monitor else None
        self._files.kept = list(state_dict["kept"])
        self._resumed = True

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        called_off = self._validation_planned and not trainer.enable_validation
        self._continuation.note(trainer, pl_module, checkpoint, called_off=called_off)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._continuation.load(checkpoint)
            if trainer.strategy.restore_checkpoint_after_setup:  # then on_fit_start is already over
                self._continuation.before_loaders(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._continuation.before_loaders(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._continuation.before_epoch(trainer)
        check_disk(trainer, pl_module, self.dirpath, keep=self.keep)
        if self._resumed:
            self._files.resume(trainer.global_step)
            self._resumed = False
        self._saved_step = trainer.global_step
        self._deferred = self._requested = False
        self._before_validation = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._continuation.before_batch(trainer, pl_module)
        self._step_before = trainer.global_step
        self._validation_planned = validation_is_due(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_trial(trainer):
            return
        step, stops = trainer.global_step, will_stop(trainer)
        due = stops or self._requested or (step != self._step_before and step % self.every_n_steps == 0)
        self._requested = False
        validates = validation_is_due(trainer)
        if validates:
            self._before_validation = random_state.capture(trainer.strategy.root_device.type)
        # Save after the validation, which updates best score, stopping and schedulers.
        self._deferred = due and validates
        if due and not self._deferred:
            self._save(trainer, must_work=stops)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or is_trial(trainer):
            return
        if self._before_validation is not None:
            random_state.restore(self._before_validation, device_type=trainer.strategy.root_device.type)
            self._before_validation = None
        score = None if self.monitor is None else _new_best(trainer, self.monitor, self.best_model_score, self.mode)
        stops = will_stop(trainer)
        if score is not None or self._deferred or stops:
            self._save(trainer, best=score, must_work=stops)
        self._deferred = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_trial(trainer) and self._saved_step not in (None, trainer.global_step):
            self._save(trainer, must_work=True)

    def _save(self, trainer: Trainer, *, best: float | None = None, must_work: bool) -> None:
        """Write the files that are due; a failure changes no file and no state of the callback."""
        step, before = trainer.global_step, self.best_model_score
        if best is not None:
            self.best_model_score = best  # before writing: the file holds it
        scheduled = step % self.every_n_steps == 0
        error = self._files.write(trainer, step=step if scheduled else None, is_best=best is not None)
        if error is None:
            self._saved_step = step
            return
        self.best_model_score = before
        newest = self.last_model_path
        rest = f"and the newest whole checkpoint is {newest}." if newest else "and there is no whole checkpoint yet."
        if must_work:
            raise CheckpointError(f"{error} The run ends at step {step}, {rest}")
        rank_zero_warn(f"{error} Training goes on at step {step}, {rest}")


def _new_best(trainer: Trainer, monitor: str, best: float | None, mode: str) -> float | None:
    """Return the monitored value if it is better than `best`, else None; all ranks agree."""
    if not validation_is_complete(trainer):
        return None
    value = trainer.callback_metrics.get(monitor)
    if value is None:
        known = ", ".join(sorted(trainer.callback_metrics)) or "none"
        rank_zero_warn(
            f"best.ckpt needs the metric {monitor!r}, which was not logged; logged are: {known}. "
            "Log it in validation_step, or set RunCheckpoint(monitor=...) to one of these or to None."
        )
        return None
    score = float(value)
    better = not math.isnan(score) and (best is None or (score < best if mode == "min" else score > best))
    return score if trainer.strategy.broadcast(better) else None
