"""What to do after a rank is lost: the newest checkpoint, and the command for fewer ranks."""

import os
import threading
from pathlib import Path

from omegaconf import DictConfig

from lightning_unified.cli.config.resume import step_of
from lightning_unified.cli.ranks.launch import Launch, ranks_left
from lightning_unified.errors import RankError
from lightning_unified.files.atomic import put_back

__all__ = ["end_soon", "with_advice"]

_GRACE_S = 30.0  # as torchrun's between SIGTERM and SIGKILL


def with_advice(
    error: RankError, *, launch: Launch, checkpoint: Path, program: str, resume: str, config: DictConfig
) -> RankError:
    """Return `error` with lines that say how to go on; an error that names no lost rank is returned as it is.

    Args:
        error: The error of a rank that is still there.
        launch: How the ranks were started.
        checkpoint: The newest checkpoint of the run.
        program: The command of one process.
        resume: The override that continues the run.
        config: The configuration of the run.
    """
    if not error.missing:
        return error
    trainer, batch = config.trainer, config.data.get("batch_size")
    known = isinstance(trainer.devices, int) and isinstance(trainer.num_nodes, int)
    size = launch.size if launch.size > 1 else trainer.devices * trainer.num_nodes if known else 2
    left = ranks_left(size, lost=len(error.missing), batch=batch if isinstance(batch, int) else None)
    command = f"{launch.command(program, ranks=left)} {resume}"
    command += "" if launch.is_external else f" trainer.devices={left}"
    if put_back(checkpoint):
        step = _step_of(checkpoint)
        kept = f"Kept: {checkpoint}" + ("" if step is None else f" of step {step}")
        lines = f"{kept}. Go on with {left} of {size} ranks: {command}"
    else:
        lines = "No checkpoint was saved yet; start the run anew."
    return RankError(f"{error}\n{lines}", failed=error.failed, missing=error.missing)


def end_soon() -> None:
    """End this process in 30 seconds if it has not ended: a device may wait for the lost rank."""
    timer = threading.Timer(_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _step_of(checkpoint: Path) -> int | None:
    try:
        return step_of(checkpoint)
    except Exception:  # the file is the user's to look at; its step is a courtesy
        return None
