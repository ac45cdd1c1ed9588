"""A clean stop: finish the step, skip validation, save, and let `fit` return normally."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning import Trainer

from lightning_unified.callbacks.checkpoint.run_checkpoint import RunCheckpoint

__all__ = ["kept_state", "restore_limits", "run_checkpoint", "stop_cleanly"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stop:
    limit_val_batches: Any
    min_epochs: Any
    min_steps: Any
    saved: str


_STOPS: WeakKeyDictionary[Trainer, _Stop] = WeakKeyDictionary()


def run_checkpoint(trainer: Trainer) -> RunCheckpoint | None:
    """Return the run's `RunCheckpoint`, or None. It saves after all other callbacks of a batch."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next((callback for callback in callbacks if isinstance(callback, RunCheckpoint)), None)


def kept_state(trainer: Trainer, *, command: str | None) -> str:
    """Return which state of the run is on the disk, and how to go on from it."""
    own = run_checkpoint(trainer)
    if own is None or own.saved_step is None:
        return "No checkpoint was saved yet."
    command = command or f'trainer.fit(module, ckpt_path="{own.last_model_path}")'
    return (
        f"Kept: {own.last_model_path} of step {own.saved_step}, of {trainer.global_step} done.\nGo on with: {command}"
    )


def stop_cleanly(trainer: Trainer, *, otherwise: str) -> str:
    """End `fit` after this batch.

    Call it from `on_train_batch_end` or `on_validation_end` with no window open. Several callbacks may request the
    stop; the first request counts.

    Args:
        trainer: The Trainer to stop; `restore_limits` restores its limits afterwards.
        otherwise: Name of the file in `default_root_dir` that is written without a `RunCheckpoint`.

    Returns:
        Path of the saved file; `RunCheckpoint` writes its own right after.
    """
    if trainer in _STOPS:
        return _STOPS[trainer].saved
    loop, own = trainer.fit_loop, run_checkpoint(trainer)
    saved = str(own.dirpath / "last.ckpt" if own is not None else Path(trainer.default_root_dir) / otherwise)
    _STOPS[trainer] = _Stop(
        limit_val_batches=trainer.limit_val_batches,
        min_epochs=loop.min_epochs,
        min_steps=loop.epoch_loop.min_steps,
        saved=saved,
    )
    trainer.limit_val_batches, loop.min_epochs, loop.epoch_loop.min_steps = 0, 0, None
    trainer.should_stop = True
    if own is None:
        trainer.save_checkpoint(saved)
    return saved


def restore_limits(trainer: Trainer) -> None:
    """Restore the limits that `stop_cleanly` changed, if any, for the Trainer's next call."""
    stop = _STOPS.pop(trainer, None)
    if stop is not None:
        loop = trainer.fit_loop
        trainer.limit_val_batches, loop.min_epochs = stop.limit_val_batches, stop.min_epochs
        loop.epoch_loop.min_steps = stop.min_steps
