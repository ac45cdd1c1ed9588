"""Decide whether a step runs within a limit on the allocator's reserved bytes.

Under a limit an allocator reserves less than it would with plenty of memory: it frees its caches and tries again.
"""

import itertools
import math
from collections.abc import Iterator
from typing import cast

from typing_extensions import override

from lightning_unified.cost_model.memory.reserve import RunReplay, allocator_peak, pools_of
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.hardware.allocators.metal import MetalLimits, MetalPools
from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Pools
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.hardware.environment.watermarks import LOW_SHARE

__all__ = ["fits_within"]

_DEFAULT = AllocatorSettings()
_STEP = 1.01  # ratio of two limits that are tried: about the error of a prediction of reserved bytes
_BELOW = 2  # judgement: steps below the limit; benchmarks/overhead/ranks/sharded_ranks.py ran out of memory in a plan with room 1 % below


def fits_within(trace: Trace, limit: int, *, settings: AllocatorSettings = _DEFAULT) -> bool:
    """Return whether steps like `trace` succeed with at most `limit` bytes reserved.

    An allocator at its limit frees its unused blocks and tries again. The moment at which that happens decides how later
    blocks are split, and a few megabytes shift the moment. So a step can succeed within a limit and fail within a slightly
    larger one. If a step meets its limit, it counts as fitting only if it succeeds within every larger limit too, and on CUDA and HIP
    2 % below. The limits tried are one percent apart and the same for all callers.

    Args:
        trace: A step in steady state.
        limit: Most bytes that the allocator may reserve.
        settings: Settings of the allocator.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    found = _reserved_within(trace, limit, settings)
    unhindered = None if found is None else allocator_peak(trace, settings=settings).reserved
    others = _limits_around(limit, below=_BELOW if trace.backend in ("cuda", "rocm") else 0)
    while found not in (None, unhindered):
        found = _reserved_within(trace, next(others), settings)
    return found is not None


def _reserved_within(trace: Trace, limit: float, settings: AllocatorSettings) -> int | None:
    """Return the most bytes reserved within `limit`; None if a block finds no place.

    Each limit is tried once for a trace: other callers ask for the same ones.
    """
    key = "allocator", settings, limit
    unhindered = trace.kept.get(("allocator", settings))
    if unhindered is not None and unhindered.reserved <= limit and trace.backend != "mps":
        return unhindered.reserved  # no block would have met the limit; Metal changes its ways before that
    if key not in trace.kept:
        pools = pools_of(trace.backend, settings)
        kind = _MetalWithinLimit if trace.backend == "mps" else _WithinLimit
        try:
            trace.kept[key] = RunReplay(trace, cast("Pools", kind(pools, limit))).peak().reserved
        except _FullError:
            trace.kept[key] = None
    return trace.kept[key]


def _limits_around(limit: float, *, below: int) -> Iterator[float]:
    """Yield the powers of `_STEP`, from `below` steps under the largest that does not exceed `limit`."""
    first = math.floor(math.log(limit) / math.log(_STEP)) - below
    yield from (_STEP**exponent for exponent in itertools.count(first))


class _FullError(Exception):
    """No place is left for a block within the limit."""


class _WithinLimit:
    """Pools that reserve at most `limit` bytes of the machine.

    Attributes:
        addresses: Addresses of segments, for pools that model them.

    Source:
        As hardware/simulated/allocator.py: torch's CUDACachingAllocator.cpp `malloc`.
    """

    def __init__(self, pools: Pools, limit: float) -> None:
        self._pools, self._limit = pools, limit
        self.addresses = getattr(pools, "addresses", None)

    @property
    def reserved(self) -> int:
        return self._pools.reserved

    def on_stream(self, stream: int) -> None:
        cast("CudaSegments", self._pools).on_stream(stream)

    def rounded(self, size: int) -> int:
        return self._pools.rounded(size)

    def reuse(self, size: int) -> Block | None:
        return self._pools.reuse(size)

    def place(self, size: int, *, pressed: bool) -> Block:
        if not self._has_room(size, pressed=pressed):
            self._pools.release()
            if not self._has_room(size, pressed=pressed):
                raise _FullError
        return self._pools.place(size, pressed=pressed)

    def _has_room(self, size: int, *, pressed: bool) -> bool:
        return self.reserved + self._pools.growth(size, pressed=pressed) <= self._limit

    def give_back(self, block: Block) -> None:
        self._pools.give_back(block)


class _MetalWithinLimit(_WithinLimit):
    """Metal's heaps with `limit` as high watermark, and the low watermark of a run."""

    def __init__(self, pools: Pools, limit: float) -> None:
        super().__init__(pools, limit)
        self._limits = MetalLimits(high=limit, low=LOW_SHARE * limit)

    @override
    def reuse(self, size: int) -> Block:
        block = cast("MetalPools", self._pools).take(size, self._limits)
        if block is None:
            raise _FullError
        return block
