"""The process group of one run among several of a sweep."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning_unified.cli.ranks.board import is_connected
from lightning_unified.cli.ranks.launch import Launch

__all__ = ["released"]

_SET = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def released(launch: Launch) -> Iterator[None]:
    """Close the connection to the ranks that a strategy started in the block, so that a sweep's next run may start its own.

    Ranks that another program started stay connected. After an error the connection is left to the end of the process.
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
