"""Whether a step goes through where an allocator may take no more than so much, which is less than it takes where there is enough."""

import itertools
import math
from collections.abc import Iterator
from typing import cast

from lightning_unified.cost_model.memory.reserve import Run, pools_of
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.hardware.allocators.pools import Block, Pools
from lightning_unified.hardware.watermarks import LOW_SHARE
from lightning_unified.units import MIB

__all__ = ["fits_within"]

_STEP = 1.01  # between two limits that are tried, about as far as a prediction of what is reserved is off


def fits_within(
    trace: Trace,
    limit: int,
    *,
    backend: str | None = None,
    expandable_segments: bool = False,
    mmap_threshold: int | None = None,
) -> bool:
    """Return whether the steps of a run like `trace` go through with no more than `limit` bytes taken of the machine.

    An allocator that comes to its limit gives back what nothing is in, and tries again. When that happens decides how what follows is
    cut up, and a few megabytes decide when: a step can go through within a limit and fail within a somewhat larger one. So it counts
    as fitting only if it goes through within every larger limit too; the limits tried are a percent apart, the same ones for all.

    Args:
        trace: A step in steady state.
        limit: Bytes.
        backend: Whose allocator; None is the trace's own.
        expandable_segments: Whether CUDA's allocator was told to use segments that grow.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    backend = backend or trace.backend

    def reserved_within(limit: float) -> int | None:
        pools = pools_of(backend, expandable_segments=expandable_segments, mmap_threshold=mmap_threshold)
        try:
            return Run(trace, cast("Pools", _WithinLimit(pools, limit, is_metal=backend == "mps"))).held().reserved
        except _FullError:
            return None

    found = reserved_within(limit)
    unhindered = None if found is None else reserved_within(math.inf)
    larger = _limits_from(limit)
    while found not in (None, unhindered):
        found = reserved_within(next(larger))
    return found is not None


def _limits_from(limit: float) -> Iterator[float]:
    """Yield the powers of `_STEP`, from the last one that is no more than `limit`."""
    first = math.floor(math.log(limit) / math.log(_STEP))
    yield from (_STEP**exponent for exponent in itertools.count(first))


class _FullError(Exception):
    """A block finds no place within the limit."""


class _WithinLimit:
    """Pools that may take no more than `limit` of the machine.

    Metal looks at what one more block would come to even where a freed one could be had, and not at the heap that the block is put
    in; above its low watermark it first gives back what is free, and makes no large heaps.

    Args:
        pools: What they would be without a limit.
        limit: Bytes.
        is_metal: Whether they are Metal's.

    Attributes:
        addresses: Where segments lie, of pools that know.

    Source:
        As hardware/simulated/allocator.py: torch's CUDACachingAllocator.cpp `malloc`, MPSAllocator.mm `alloc_buffer_block`.
    """

    def __init__(self, pools: Pools, limit: float, *, is_metal: bool) -> None:
        self._pools, self._limit, self._is_metal = pools, limit, is_metal
        self.addresses = getattr(pools, "addresses", None)

    @property
    def reserved(self) -> int:
        return self._pools.reserved

    def rounded(self, size: int) -> int:
        return self._pools.rounded(size)

    def reuse(self, size: int) -> Block | None:
        if self._is_metal and self.reserved + size > self._limit:
            return None
        return self._pools.reuse(size)

    def place(self, size: int, *, pressed: bool) -> Block:
        pressed = pressed or (self._is_metal and size > MIB and self.reserved >= LOW_SHARE * self._limit)
        if pressed:
            self._pools.release()
        if not self._has_room(size, pressed=pressed):
            self._pools.release()
            if not self._has_room(size, pressed=pressed):
                raise _FullError
        return self._pools.place(size, pressed=pressed)

    def _has_room(self, size: int, *, pressed: bool) -> bool:
        growth = size if self._is_metal else self._pools.growth(size, pressed=pressed)
        return self.reserved + growth <= self._limit

    def give_back(self, block: Block) -> None:
        self._pools.give_back(block)
