"""Free disk space, compared with a run's checkpoints before training."""

import shutil
from pathlib import Path

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_unified.callbacks.loops import is_trial
from lightning_unified.cost_model import static_bytes
from lightning_unified.errors import ConfigurationError
from lightning_unified.units import format_bytes

__all__ = ["check_disk", "checkpoint_bytes", "free_bytes", "shortage"]

_BESIDE_STEPS = 2  # best.ckpt, and the file that is being written; last.ckpt is a link


def check_disk(trainer: Trainer, module: LightningModule, folder: Path, *, keep: int) -> None:
    """Compare the free bytes of the disk with the checkpoints of a fit; a trial run writes none.

    All ranks use the figure of the first.

    Raises:
        ConfigurationError: If the disk cannot hold one checkpoint.
    """
    free = None if is_trial(trainer) else trainer.strategy.broadcast(free_bytes(folder))
    if free is None:
        return
    warning = shortage(checkpoint_bytes(trainer, module), free=free, keep=keep, folder=folder)
    if warning is not None:
        rank_zero_warn(warning)


def shortage(size: int, *, free: int, keep: int, folder: Path) -> str | None:
    """Return in words that the disk cannot hold all files, or None if it can.

    Args:
        size: Bytes of one checkpoint.
        free: Free bytes of the disk.
        keep: Number of step files to keep.
        folder: Folder of the files.

    Raises:
        ConfigurationError: If the disk cannot hold one checkpoint.
    """
    files = keep + _BESIDE_STEPS
    if size > free:
        raise ConfigurationError(
            f"{folder}: the disk has {format_bytes(free)} free, and one checkpoint takes {format_bytes(size)} (weights and optimizer state); "
            "free space, name a folder on another disk, or train with enable_checkpointing=False."
        )
    if files * size <= free:
        return None
    return (
        f"{folder}: the disk has {format_bytes(free)} free, and up to {files} checkpoints of {format_bytes(size)} take "
        f"{format_bytes(files * size)}; later ones may fail. Free space, or lower keep={keep}."
    )


def checkpoint_bytes(trainer: Trainer, module: LightningModule) -> int:
    """Return the least bytes of a checkpoint: weights, buffers and optimizer state.

    A module with `on_save_checkpoint` may leave frozen weights out, so only its trainable ones count.
    """
    need = static_bytes(module, trainer.optimizers)
    saves_less = is_overridden("on_save_checkpoint", module, LightningModule)
    weights = need["gradients"] if saves_less else need["weights"] + need["buffers"]
    return weights + need["optimizer state"]


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the disk of `folder`, which need not exist yet; None if unknown."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None
