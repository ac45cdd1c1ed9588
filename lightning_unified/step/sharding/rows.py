"""The rows of a whole tensor that a rank holds, and the whole tensor from the rows of all ranks."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.ranks.consensus import Outcome, Point, Ranks
from lightning_unified.step.recovery.oom import caught, release_cached_memory

__all__ = ["as_dtensor", "empty_like_shard", "gathered", "local", "refuse_placement", "rows_of", "sharded_like"]

T = TypeVar("T")

_ATTEMPTS = 3  # judgement: memory of caches and of other programs may be free at the next attempt


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this rank, without a gradient function."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def refuse_placement(name: str, tensor: Tensor) -> None:
    """Raise `ConfigurationError` unless `tensor` is sharded by rows over one dimension, or replicated."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    if placements not in ((), (Shard(0),), (Replicate(),)):
        raise ConfigurationError(
            f'strategy="unified_fsdp" divides parameters by rows over all ranks, and {name} has the placements {placements}. Hybrid '
            "sharding and tensor parallelism are not supported; in configure_model, call fully_shard with a mesh of one dimension and no "
            "shard_placement_fn."
        )


def rows_of(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first of the rows that a rank holds, and the row after its last, of a tensor of so many rows.

    Each rank holds the same number, except the last ones, which may hold fewer or none, as `torch.chunk` divides.
    """
    most = -(-rows // ranks)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def sharded_like(whole: Tensor, like: DTensor, ranks: Ranks) -> DTensor:
    """Return a whole tensor, which every rank has, as a DTensor with this rank's rows in memory of their own."""
    if like.placements == (Shard(0),):
        begin, end = rows_of(whole.shape[0], rank=ranks.rank, ranks=ranks.size)
        whole_rows = whole[begin:end]
    else:
        whole_rows = whole
    own = torch.empty(whole_rows.shape, dtype=whole.dtype, device=like.device).copy_(whole_rows)
    return as_dtensor(own, like)


def empty_like_shard(like: DTensor, dtype: torch.dtype) -> DTensor:
    """Return a DTensor placed and shaped as `like`, in memory without values."""
    return as_dtensor(torch.empty(local(like).shape, dtype=dtype, device=like.device), like)


def as_dtensor(own: Tensor, like: DTensor) -> DTensor:
    """Return this rank's rows of a tensor that is placed and shaped as `like`, as a DTensor."""
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gathered(tensor: DTensor, ranks: Ranks, *, wanted: bool) -> Tensor | None:
    """Return the whole of `tensor` on the host of each rank that has `wanted` it; None on others.

    All ranks call it together.

    All memory is allocated before the ranks meet, so that no rank waits for one that has none.

    Raises:
        torch.OutOfMemoryError: On all ranks, if one of them has no memory for it after caches were cleared.
        ConfigurationError: If the tensor is divided in another way than by rows.
    """
    refuse_placement("a tensor of the optimizer's state", tensor)
    own = local(tensor)
    if tensor.placements == (Replicate(),):
        return own.cpu() if wanted else None
    parts = _allocated(partial(_memory, own, tensor.shape, ranks, wanted=wanted), ranks, own.device)
    with ranks.losses_named():
        dist.all_gather_into_tensor(parts[1], parts[0], group=tensor.device_mesh.get_group())
    if parts[2] is None:
        return None
    return parts[2].copy_(parts[1][: tensor.shape[0]])


def _memory(own: Tensor, shape: torch.Size, ranks: Ranks, *, wanted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return this rank's padded rows, memory for the rows of all ranks, and memory on the host.

    All ranks send as many rows.
    """
    most = -(-shape[0] // ranks.size)
    mine = own.new_zeros((most, *shape[1:]))
    mine[: own.shape[0]].copy_(own)
    host = torch.empty(shape, dtype=own.dtype) if wanted else None
    return mine, own.new_empty((most * ranks.size, *shape[1:])), host


def _allocated(allocate: Callable[[], T], ranks: Ranks, device: torch.device) -> T:
    """Return the memory that `allocate` gives, once all ranks have theirs.

    Raises:
        torch.OutOfMemoryError: On all ranks, if one of them has none after caches were cleared.
    """
    short = ""
    for _ in range(_ATTEMPTS):
        memory, reason = caught(allocate)
        words = ranks.meet(Point.GATHER, Outcome.WELL if reason is None else Outcome.SHORT, text=reason or "")
        lacking = [word for word in words if word.outcome is not Outcome.WELL]
        if not lacking and memory is not None:
            return memory
        del memory
        short = "; ".join(f"rank {word.rank}: {word.text}" for word in lacking)
        release_cached_memory(device)
    raise torch.OutOfMemoryError(f"whole tensors cannot be gathered: {short}")
