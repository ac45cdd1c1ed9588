"""Models of MPS's allocators, chosen by torch's version."""

from typing import Protocol

from lightning_unified.hardware.allocators.metal.heaps import MetalHeaps
from lightning_unified.hardware.allocators.metal.limits import MetalLimits
from lightning_unified.hardware.allocators.metal.placement import PlacementHeaps
from lightning_unified.hardware.allocators.pools import Block, Pools

__all__ = ["MetalHeaps", "MetalLimits", "MetalPools", "PlacementHeaps", "metal_pools"]

_PLACES_BUFFERS_SINCE = (2, 14)


class MetalPools(Pools, Protocol):
    """Interface of both models of MPS's allocator."""

    def take(self, size: int, limits: MetalLimits) -> Block | None:
        """Return a reused or new block of a rounded size; None if the watermarks leave no room."""
        ...


def metal_pools(torch_version: tuple[int, int], *, max_buffer: int | None = None) -> MetalPools:
    """Return empty pools of MPS's allocator in a version of torch.

    Args:
        torch_version: (major, minor). The allocator changed in 2.14; no environment variable chooses between the two.
        max_buffer: Metal's longest buffer in bytes; None if unknown.
    """
    return PlacementHeaps(max_buffer=max_buffer) if torch_version >= _PLACES_BUFFERS_SINCE else MetalHeaps()
