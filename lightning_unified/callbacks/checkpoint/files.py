"""Files of a run's checkpoints: one write under several names, of which the newest are kept."""

from functools import partial
from pathlib import Path

from lightning import Trainer

from lightning_unified.errors import CheckpointError
from lightning_unified.files.atomic import PARTIAL, publish, remove, remove_partial_files, share
from lightning_unified.step.recovery.checkpoint_io import wait_for_writers
from lightning_unified.step.recovery.oom import caught, release_cached_memory

__all__ = ["BEST", "LAST", "CheckpointFiles", "write_state"]

LAST, BEST = "last.ckpt", "best.ckpt"


class CheckpointFiles:
    """`step_<n>.ckpt`, of which the newest are kept, `last.ckpt` and `best.ckpt`, in one folder.

    Args:
        keep: Number of `step_<n>.ckpt` to keep.

    Attributes:
        folder: The folder, known once `fit` has begun.
        kept: Names of the kept step files, those to be deleted next first.
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self.folder = Path()
        self.kept: list[str] = []

    def open(self, folder: Path, *, cleans: bool) -> None:
        """Use `folder`, and remove files that an earlier process left half written."""
        self.folder = folder
        if cleans and folder.is_dir():
            remove_partial_files(folder)

    def resume(self, step: int) -> None:
        """Delete files of steps after `step` first.

        A run that resumed from an older file repeats those steps.
        """
        here = {path.name for path in self.folder.glob("step_*.ckpt")}
        newer = sorted(name for name in here - set(self.kept) if name > _name(step))
        self.kept = [*newer, *(name for name in self.kept if name in here)]

    def path_if_here(self, name: str) -> str:
        """Return the path of a file, or `""` while it does not exist."""
        path = self.folder / name
        return str(path) if path.exists() else ""

    def write(self, trainer: Trainer, *, step: int | None, is_best: bool) -> str | None:
        """Write the state once and link it to all due names.

        Return the error of any rank in words, or None. A failure changes no file.

        Args:
            trainer: The Trainer whose state is saved.
            step: The step of a scheduled file; None writes `last.ckpt` only.
            is_best: Whether `best.ckpt` is due.
        """
        before, name = self.kept, LAST if step is None else _name(step)
        # Update the list before writing: the file holds it, and it must be true once the file has its name.
        if step is not None:
            self.kept = [*(old for old in self.kept if old != name), name]
        dropped, self.kept = self.kept[: -self._keep], self.kept[-self._keep :]
        links = [other for other, due in ((LAST, step is not None), (BEST, is_best)) if due]
        error = _write_and_link(trainer, self.folder, name, links=links, dropped=dropped)
        if error is not None:
            self.kept = before
        return error


def _name(step: int) -> str:
    return f"step_{step:06d}.ckpt"


def _write_and_link(trainer: Trainer, folder: Path, name: str, *, links: list[str], dropped: list[str]) -> str | None:
    """Write `name`, link it to `links`, delete `dropped`.

    Return the error of any rank in words, or None.
    """
    unnamed = folder / f".{name}.new{PARTIAL}"
    failure = None
    try:
        failure = write_state(trainer, unnamed)
        failed = trainer.strategy.reduce_boolean_decision(failure is not None, all=False)
        if trainer.is_global_zero and not failed:
            publish(unnamed, folder / name)
            for other in links:
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
    """Save the state of `trainer` to `path`.

    Return this rank's error in words, or None. No rank is left waiting. If memory runs out, a single process tries
    again. With several processes, the others would have gone on by then.
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
