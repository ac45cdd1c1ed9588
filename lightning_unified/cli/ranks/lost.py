"""What a user needs to know after a rank is lost: the newest checkpoint, and the command that goes on with fewer ranks."""

import os
import threading
from pathlib import Path

from lightning_unified.cli.ranks.launch import Launch, ranks_left
from lightning_unified.errors import RankError

__all__ = ["advice", "end_soon"]

_GRACE_S = 30.0  # as torchrun's between SIGTERM and SIGKILL


def advice(
    error: RankError, *, launch: Launch, checkpoint: Path, program: str, resume: str, size: int, batch: int | None
) -> str:
    """Return the lines to print below `error`.

    Args:
        error: The error of a rank that goes on living.
        launch: How the ranks were started.
        checkpoint: The newest checkpoint of the run.
        program: The command of one process.
        resume: The override that continues the run.
        size: The number of ranks that the run had.
        batch: The effective batch, which the remaining ranks must share evenly.
    """
    if not checkpoint.is_file():
        return "No checkpoint was saved yet; start the run anew."
    left = ranks_left(size, lost=len(error.missing), batch=batch)
    command = f"{launch.command(program, ranks=left)} {resume}"
    if not launch.is_external:
        command += f" trainer.devices={left}"
    step = _step_of(checkpoint)
    kept = f"Kept: {checkpoint}" + ("" if step is None else f" of step {step}")
    return f"{kept}. Go on with {left} of {size} ranks: {command}"


def end_soon() -> None:
    """End this process in 30 seconds if it has not ended by then: a device may wait for the lost rank without end."""
    timer = threading.Timer(_GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _step_of(checkpoint: Path) -> int | None:
    import torch

    try:
        return int(torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # the file is the user's to look at; its step is a courtesy
        return None
