"""Decide whether a step runs within a limit on the allocator's reserved bytes.

Under a limit an allocator reserves less than it would with plenty of memory: it frees its caches and tries again.
"""

import itertools
import math
from collections.abc import Iterator
from typing import cast

from lightning_unified.cost_model.memory.reserve import RunReplay, pools_of
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.hardware.allocators.pools import Block, Pools
from lightning_unified.hardware.environment.watermarks import LOW_SHARE
from lightning_unified.units import MIB

__all__ = ["fits_within"]

_STEP = 1.01  # ratio of two limits that are tried: about the error of a prediction of reserved bytes


def fits_within(trace: Trace, limit: int, *, mmap_threshold: int | None = None) -> bool:
    """Return whether the steps of a run like `trace` succeed with at most `limit` bytes reserved.

    An allocator at its limit frees its unused blocks and tries again. The moment at which that happens decides how later
    blocks are split, and a few megabytes shift the moment. So a step can succeed within a limit and fail within a slightly
    larger one. It counts as fitting only if it succeeds within every larger limit too. The limits tried are one percent apart
    and the same for all callers.

    Args:
        trace: A step in steady state.
        limit: Most bytes that the allocator may reserve.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if the user set it; None models the C library's moving
            threshold.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """

    def reserved_within(limit: float) -> int | None:
        pools = pools_of(trace.backend, mmap_threshold=mmap_threshold)
        limited = cast("Pools", _WithinLimit(pools, limit, is_metal=trace.backend == "mps"))
        try:
            return RunReplay(trace, limited).peak().reserved
        except _FullError:
            return None

    found = reserved_within(limit)
    unhindered = None if found is None else reserved_within(math.inf)
    larger = _limits_from(limit)
    while found not in (None, unhindered):
        found = reserved_within(next(larger))
    return found is not None


def _limits_from(limit: float) -> Iterator[float]:
    """Yield the powers of `_STEP`, starting with the largest that does not exceed `limit`."""
    first = math.floor(math.log(limit) / math.log(_STEP))
    yield from (_STEP**exponent for exponent in itertools.count(first))


class _FullError(Exception):
    """No place is left for a block within the limit."""


class _WithinLimit:
    """Pools that reserve at most `limit` bytes of the machine.

    Metal compares the size of one more block with the limit, even if a freed block could be reused, and ignores the heap in
    which the block lies. Above its low watermark it first frees its unused blocks and creates no large heaps.

    Attributes:
        addresses: Addresses of segments, for pools that model them.

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
