"""Collectives of CPU processes through a file that they all map.

They take no memory of torch's allocator.

gloo copies a tensor several times to gather or to scatter it, and NCCL does not. These collectives copy into the file and out of it, so
that torch's allocator holds only what the trained step itself holds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_unified.cost_model.backends.patching import replaced

__all__ = ["through_file"]

_BYTES = 1 << 30  # of the sparse file: enough for the inputs of all ranks
_GATHERS = ("all_gather_into_tensor", "all_gather_single")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


@contextmanager
def through_file(path: Path) -> Iterator[None]:
    """Run all-gathers and reduce-scatters of the default group through the file at `path`.

    Other collectives are gloo's. A mean is not offered: FSDP2 divides by itself with gloo.
    """
    with path.open("ab") as file:
        file.truncate(_BYTES)
    memory = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=(_BYTES,)))

    def gather(output: Tensor | None = None, given: Tensor | None = None, *_: Any, **named: Any) -> None:
        whole = named.get("output_tensor") if output is None else output
        own = named.get("input_tensor") if given is None else given
        assert whole is not None
        assert own is not None
        ranks, rank = dist.get_world_size(), dist.get_rank()
        parts = memory.view(own.dtype)[: whole.numel()].view(ranks, -1)
        parts[rank].copy_(own.view(-1))
        dist.barrier()
        whole.view(ranks, -1).copy_(parts)
        dist.barrier()

    def scatter(output: Tensor | None = None, given: Tensor | None = None, *_: Any, **named: Any) -> None:
        own = named.get("output_tensor", named.get("output")) if output is None else output
        whole = named.get("input_tensor", named.get("input")) if given is None else given
        assert whole is not None
        assert own is not None
        ranks, rank = dist.get_world_size(), dist.get_rank()
        parts = memory.view(whole.dtype)[: ranks * whole.numel()].view(ranks, ranks, -1)
        parts[rank].copy_(whole.view(ranks, -1))
        dist.barrier()
        own.view(-1).copy_(parts[0, rank])
        for other in range(1, ranks):
            own.view(-1).add_(parts[other, rank])
        dist.barrier()

    found = [(name, gather) for name in _GATHERS] + [(name, scatter) for name in _SCATTERS]
    with _all_replaced([(name, call) for name, call in found if hasattr(dist, name)]):
        yield


@contextmanager
def _all_replaced(calls: list[tuple[str, Any]]) -> Iterator[None]:
    if not calls:
        yield
        return
    (name, call), *others = calls
    with replaced(dist, name, call), _all_replaced(others):
        yield
