"""What recorded graphs hold of the device for themselves."""

from typing import Any

import torch

__all__ = ["pool_bytes"]


def pool_bytes(pool: Any) -> int:
    """Return the bytes that the allocator has taken of the device for a pool that graphs share.

    Args:
        pool: As `torch.cuda.graph_pool_handle` gives it.
    """
    return sum(
        one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(pool)
    )
