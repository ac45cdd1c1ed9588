"""A process group of any size in one process, whose collectives transfer nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_unified.errors import ConfigurationError

__all__ = ["fake_group", "fake_mesh"]


@contextmanager
def fake_group(devices: int) -> Iterator[None]:
    """Let this process be the first of `devices` ranks inside the block.

    A process that is one of as many real ranks keeps its group: dry runs send nothing over it.

    Raises:
        ConfigurationError: If torch has no distributed package, or this process is one of another number of ranks.
    """
    if not dist.is_available():
        raise ConfigurationError("devices above 1 need torch.distributed, which this build of torch lacks.")
    if dist.is_initialized():
        if dist.get_world_size() != devices:
            raise ConfigurationError(
                f"devices={devices}: this process is one of {dist.get_world_size()} ranks already; plan for another number of devices "
                "in a process of its own."
            )
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_mesh() -> DeviceMesh:
    """Return a mesh of this run's ranks whose collectives transfer nothing.

    Dry runs of a sharded fit use it. All ranks call it together. Each keeps its number, and the groups of the run stay as they are.
    """
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    group = cast("dist.ProcessGroup", dist.new_group(backend="fake"))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data_parallel",))
