"""The rungs of `PressureGuard`: the direction that samples call for, and its stateless actions."""

from enum import IntEnum
from pathlib import Path

from lightning import Trainer

from lightning_unified.callbacks.checkpoint.files import write_state
from lightning_unified.callbacks.device_pool import pool_of
from lightning_unified.callbacks.loops import is_trial
from lightning_unified.callbacks.pressure.watch import Verdict
from lightning_unified.callbacks.stopping import run_checkpoint
from lightning_unified.step.recovery.oom import release_cached_memory

__all__ = ["FILE", "Direction", "Rung", "checkpoint", "clear", "direction_of", "grow", "shrink"]

FILE = "pressure.ckpt"
"""The checkpoint in `default_root_dir` of a run without `RunCheckpoint`."""

# A judgement: samples between two rungs while pressure is a warning, and between two steps down. macOS delays the fall of its level
# by 5 s (XNU, bsd/kern/kern_memorystatus_notify.c), so an action shows no earlier; a sample takes a second.
_COOL_DOWN = 5


class Rung(IntEnum):
    """The actions in order; 0 is a run without pressure."""

    NONE = 0
    WARN = 1
    CLEAR = 2
    SHRINK = 3
    CHECKPOINT = 4
    STOP = 5


class Direction(IntEnum):
    """Where the samples call for; of several processes the largest counts."""

    DOWN = -1
    STAY = 0
    UP = 1
    UP_TO_STOP = 2


def direction_of(verdict: Verdict, *, rung: int, acted_at: int, samples: int) -> Direction:
    """Return the direction that the samples since the last action call for.

    Args:
        verdict: The summary of all samples.
        rung: The present rung.
        acted_at: The number of samples at the last action.
        samples: Number of equal samples in a row that make a level certain.
    """
    fresh = verdict.index - acted_at
    later = max(samples, _COOL_DOWN)
    if min(verdict.critical, fresh) >= samples:
        return Direction.UP_TO_STOP
    if min(verdict.pressed, fresh) >= (later if rung else samples):
        return Direction.UP
    return Direction.DOWN if rung and min(verdict.calm, fresh) >= later else Direction.STAY


def clear(trainer: Trainer) -> tuple[bool, str]:
    """Clear caches; like every rung, return whether it was taken, and a description."""
    device, sources = pool_of(trainer)
    release_cached_memory(device, sources=sources)
    return True, "caches cleared"


def shrink(trainer: Trainer, reason: str) -> tuple[bool, str]:
    """Halve the micro-batch of a strategy that can."""
    strategy = trainer.strategy
    halve = getattr(strategy, "shrink", None)
    if halve is None:
        return False, f"shrink skipped: {type(strategy).__name__} cannot split its batches"
    if not halve(reason):
        return False, f"shrink skipped: {type(strategy).__name__} cannot split its batches further"
    return True, f"micro-batch shrunk to {getattr(strategy, 'micro_batch_size', None)} rows"


def grow(trainer: Trainer) -> str:
    """Undo one halving by `shrink` and return its description; `""` if there was none."""
    undo = getattr(trainer.strategy, "grow", None)
    if undo is None or not undo("memory pressure is over"):
        return ""
    return f", micro-batch grown to {getattr(trainer.strategy, 'micro_batch_size', None)} rows"


def checkpoint(trainer: Trainer) -> tuple[bool, str]:
    """Request the run's checkpoint, or write one without a `RunCheckpoint`."""
    if is_trial(trainer):
        return False, "checkpoint skipped: fast_dev_run keeps nothing"
    own = run_checkpoint(trainer)
    if own is not None:
        own.request()
        return True, f"checkpoint due at step {trainer.global_step}"
    failure = write_state(trainer, Path(trainer.default_root_dir) / FILE)
    return failure is None, f"checkpoint skipped: {failure}" if failure else f"checkpoint saved: {FILE}"
