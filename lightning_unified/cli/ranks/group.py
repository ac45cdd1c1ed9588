"""The ranks that a run starts itself: their command, their end, and the connection to them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from lightning_unified.cli.ranks.board import is_connected
from lightning_unified.cli.ranks.launch import Launch

if TYPE_CHECKING:
    from lightning import Trainer

__all__ = ["own_ranks", "released"]

_SET = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def own_ranks(trainer: "Trainer", command: Sequence[str]) -> Iterator[None]:
    """Let the strategy's launcher start further ranks by `command`, and wait for their end after the block."""
    from lightning_unified.strategies.launcher import WatchedLauncher

    launcher = trainer.strategy.launcher
    if not isinstance(launcher, WatchedLauncher):
        yield
        return
    launcher.command = command
    try:
        yield
    finally:
        launcher.wait()


@contextmanager
def released(launch: Launch) -> Iterator[None]:
    """Close the connection to the ranks that a strategy started in the block.

    The next run of a sweep may then start its own. Ranks that another program started stay connected.
    """
    if launch.by != "user":
        yield
        return
    before = {name: os.environ.get(name) for name in _SET}
    try:
        yield
        if is_connected():
            import torch.distributed as dist

            with suppress(RuntimeError):
                dist.destroy_process_group()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
