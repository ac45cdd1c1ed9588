"""`RunCheckpoint`: step checkpoints, `last.ckpt` and `best.ckpt`, for bit-exact resumes."""

import math
from functools import partial
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
from lightning_unified.callbacks.loops import is_trial, validation_is_complete, validation_is_due, will_stop
from lightning_unified.errors import CheckpointError, ConfigurationError
from lightning_unified.step.recovery.checkpoint_io import (
    PARTIAL,
    publish,
    remove,
    remove_partial_files,
    share,
    wait_for_writers,
)
from lightning_unified.step.recovery.oom import caught, release_cached_memory

__all__ = ["RunCheckpoint", "write_state"]


class RunCheckpoint(Checkpoint):
    """Write `step_<n>.ckpt` every few steps and keep the newest, `last.ckpt` and `best.ckpt`.

    Deviations from Lightning's `ModelCheckpoint`:

    1. One write serves all names by hard links; two `ModelCheckpoint`s would write the whole state twice.
    2. A file due at a step with a validation is written after it, when best score, early stopping and schedulers are final.
    3. With any IO plugin, a name refers to a complete file only.
    4. A run resumed from any file continues bit for bit: the file also holds the random states of all ranks, and the gradients
       of an open accumulation window. For that, validation does not advance the random streams of training.

    If a write fails (full disk), the callback warns, training goes on, and earlier files stay. At the end of a run a failed write is
    an error, because the steps since the last good file would be lost.

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
        if every_n_steps < 1 or keep < 1:
            raise ConfigurationError(f"every_n_steps={every_n_steps} and keep={keep} must both be 1 or more.")
        if mode not in {"min", "max"}:
            raise ConfigurationError(f"mode={mode!r} is not known; use 'min' or 'max'.")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.monitor = monitor
        self.mode = mode
        self.best_model_score: float | None = None
        self._given = dirpath
        self._folder = Path()
        self._kept: list[str] = []
        self._saved: tuple[int, int] | None = None  # (optimizer steps, batches) at the newest file
        self._step_before = 0
        self._validation_planned = False
        self._deferred = False
        self._requested = False
        self._resumed = False
        self._before_validation: dict[str, Any] | None = None
        self._continuation = Continuation()

    @property
    @override
    def state_key(self) -> str:
        """The key of this callback's state: independent of arguments, so that a resume may change `every_n_steps`."""
        return "RunCheckpoint"

    @property
    def dirpath(self) -> Path:
        """The folder of the files, known once `fit` has begun."""
        return self._folder

    @property
    def last_model_path(self) -> str:
        """The newest file, or `""` while there is none; loggers and `Trainer` read this attribute."""
        return self._path_if_here("last.ckpt")

    @property
    def best_model_path(self) -> str:
        """The file with the best `monitor`, or `""` while there is none; `Trainer(ckpt_path="best")` reads it."""
        return self._path_if_here("best.ckpt")

    def request(self) -> None:
        """Request a `last.ckpt` at the end of this batch; call it from a callback's `on_train_batch_end`.

        All processes must request it after the same batch.
        """
        self._requested = True

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._continuation.forget()
        if isinstance(trainer.precision_plugin, DoublePrecision):
            pl_module.double()  # Lightning (2.6.6) converts the module only after it loaded the checkpoint, in float32
        folder = self._given or Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints"
        self._folder = Path(trainer.strategy.broadcast(str(folder)))
        if stage == "fit" and trainer.is_global_zero and self._folder.is_dir():
            remove_partial_files(self._folder)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best_score": self.best_model_score, "kept": list(self._kept)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_score = state_dict["best_score"] if state_dict["monitor"] == self.monitor else None
        self._kept = list(state_dict["kept"])
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
        if self._resumed:
            # After a resume from an older file, files of later steps are deleted first: this run repeats those steps.
            here = {path.name for path in self._folder.glob("step_*.ckpt")}
            newer = sorted(name for name in here - set(self._kept) if name > _name(trainer.global_step))
            self._kept = [*newer, *(name for name in self._kept if name in here)]
            self._resumed = False
        self._saved = (trainer.global_step, trainer.fit_loop.total_batch_idx)
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
        self._deferred = (
            due and validates
        )  # save after the validation, which updates best score, stopping and schedulers
        if due and not self._deferred:
            self._save(trainer, must_work=stops)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or is_trial(trainer):
            return
        if self._before_validation is not None:
            random_state.restore(self._before_validation, device_type=trainer.strategy.root_device.type)
            self._before_validation = None
        score, stops = self._improvement(trainer), will_stop(trainer)
        if score is not None or self._deferred or stops:
            self._save(trainer, best=score, must_work=stops)
        self._deferred = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_trial(trainer) and self._saved is not None and self._saved[0] != trainer.global_step:
            self._save(trainer, must_work=True)

    def _improvement(self, trainer: Trainer) -> float | None:
        """Return the monitored value if it is the best so far, else None; all ranks agree."""
        if self.monitor is None or not validation_is_complete(trainer):
            return None
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            rank_zero_warn(
                f"best.ckpt needs the metric {self.monitor!r}, which was not logged; logged are: {known}. "
                "Log it in validation_step, or set RunCheckpoint(monitor=...) to one of these or to None."
            )
            return None
        score, best = float(value), self.best_model_score
        better = not math.isnan(score) and (best is None or (score < best if self.mode == "min" else score > best))
        return score if trainer.strategy.broadcast(better) else None

    def _save(self, trainer: Trainer, *, best: float | None = None, must_work: bool) -> None:
        """Write the state once and link it to all due names; a failure changes no file and no state of the callback."""
        before = self.best_model_score, list(self._kept)
        step = trainer.global_step
        scheduled = step % self.every_n_steps == 0
        name = _name(step) if scheduled else "last.ckpt"
        # Update the state before writing: the file holds it, and it must be true once the file has its name.
        if scheduled:
            self._kept = [*(old for old in self._kept if old != name), name]
        dropped, self._kept = self._kept[: -self.keep], self._kept[-self.keep :]
        if best is not None:
            self.best_model_score = best
        shares = [other for other, due in (("last.ckpt", scheduled), ("best.ckpt", best is not None)) if due]
        error = _write_and_link(trainer, self._folder, name, shares=shares, dropped=dropped)
        if error is None:
            self._saved = (step, trainer.fit_loop.total_batch_idx)
            return
        self.best_model_score, self._kept = before
        if must_work:
            raise CheckpointError(f"{error} The run ends at step {step}, {self._loss_in_words()}")
        rank_zero_warn(f"{error} Training goes on at step {step}, {self._loss_in_words()}")

    def _loss_in_words(self) -> str:
        last = self.last_model_path
        return f"and the newest whole checkpoint is {last}." if last else "and there is no whole checkpoint yet."

    def _path_if_here(self, name: str) -> str:
        path = self._folder / name
        return str(path) if path.exists() else ""


def _name(step: int) -> str:
    return f"step_{step:06d}.ckpt"


def _write_and_link(trainer: Trainer, folder: Path, name: str, *, shares: list[str], dropped: list[str]) -> str | None:
    """Write `name`, link it to `shares`, delete `dropped`; return the error of any rank in words, or None."""
    unnamed = folder / f".{name}.new{PARTIAL}"
    failure = None
    try:
        failure = write_state(trainer, unnamed)
        failed = trainer.strategy.reduce_boolean_decision(failure is not None, all=False)
        if trainer.is_global_zero and not failed:
            publish(unnamed, folder / name)
            for other in shares:
                share(folder / name, folder / other)
            for old in dropped:
                remove(folder / old)
    except OSError as error:
        failure = f"could not name the checkpoint {folder / name}: {error}."
    finally:
        if trainer.is_global_zero:
            remove(unnamed)
    if not trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
        return None
    return failure or "another rank could not write its part of the checkpoint."


def write_state(trainer: Trainer, path: Path) -> str | None:
    """Save the state of `trainer` to `path`; return this rank's error in words, or None. No rank is left waiting.

    If memory runs out, a single process tries again. With several processes, the others would have gone on by then.
    """
    save = partial(trainer.save_checkpoint, path)
    try:
        _, memory_ran_out = caught(save)
        if memory_ran_out is not None and trainer.world_size == 1:
            release_cached_memory(trainer.strategy.root_device)
            _, memory_ran_out = caught(save)
        wait_for_writers(trainer.strategy.checkpoint_io)
    except (CheckpointError, OSError) as error:
        failure = str(error)
    else:
        if memory_ran_out is None:
            return None
        failure = f"memory ran out while the state for {path} was gathered ({memory_ran_out})."
    trainer.strategy.barrier("Trainer.save_checkpoint")  # where the ranks that did not fail are waiting
    return failure
