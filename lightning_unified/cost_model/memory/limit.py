"""Decide whether a step runs within a limit on the allocator's reserved bytes.

Under a limit an allocator reserves less than it would with plenty of memory: it frees its caches and tries again.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import cast

from typing_extensions import override

from lightning_unified.cost_model.memory.reserve import FullError, Replay, allocator_peak, pools_of
from lightning_unified.cost_model.trace.trace import Take, Trace
from lightning_unified.hardware.allocators.metal import MetalLimits, MetalPools
from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Pools
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.hardware.environment.watermarks import LOW_SHARE
from lightning_unified.units import MIB

__all__ = ["fits_within"]

_DEFAULT = AllocatorSettings()
_UNKNOWN = object()
_STEP = 1.01  # ratio of two limits that are tried: about the error of a prediction of reserved bytes
_BELOW = 2  # judgement: steps below the limit; plans with room 1 % below have run out of memory (sharded_ranks.py, compiled_blocks.py)
_BELOW_RECORDED = (
    4  # judgement: the same for recorded CUDA graphs; a plan with room 1 % below needed 3 % more (compiled_blocks.py)
)


def fits_within(trace: Trace, limit: int, *, settings: AllocatorSettings = _DEFAULT) -> bool:
    """Return whether steps like `trace` succeed with at most `limit` bytes reserved.

    An allocator at its limit frees its unused blocks and tries again. The moment at which that happens decides how later
    blocks are split, and a few megabytes shift the moment. So a step can succeed within a limit and fail within a slightly
    larger one. If a step meets its limit, it counts as fitting only if it succeeds within every larger limit too, and on CUDA and HIP
    2 % below. So must a step with expandable segments that comes as near as that to its limit, because predictions of their bytes
    are too low by 1 % or 2 %, and with recorded CUDA graphs, whose memory is not shared with other passes, by up to 4 %. The limits
    tried are one percent apart and the same for all callers.

    Args:
        trace: A step in steady state.
        limit: Most bytes that the allocator may reserve.
        settings: Settings of the allocator.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    unhindered = allocator_peak(trace, settings=settings).reserved
    found = _reserved_within(trace, limit, settings)
    below = _BELOW_RECORDED if trace.replayed else _BELOW
    others = _limits_around(limit, below=below if trace.backend in ("cuda", "rocm") else 0)
    if found == unhindered and (settings.expandable or trace.replayed):
        found = _reserved_within(trace, next(others), settings)
    while found not in (None, unhindered):
        found = _reserved_within(trace, next(others), settings)
    return found is not None


def _reserved_within(trace: Trace, limit: float, settings: AllocatorSettings) -> int | None:
    """Return the most bytes reserved within `limit`; None if a block finds no place.

    Each limit is tried once for a trace: other callers ask for the same ones.
    """
    key = "allocator", settings, limit
    unhindered = trace.kept.get(("allocator", settings))
    if unhindered is not None and unhindered.reserved <= (
        _unnoticed(trace, limit) if trace.backend == "mps" else limit
    ):
        return unhindered.reserved  # no block would have met the limit
    if key not in trace.kept:
        alike = trace.kept.setdefault(("alike", settings), [])
        same = next((found for lowest, highest, found in alike if lowest <= limit < highest), _UNKNOWN)
        trace.kept[key] = _replayed(trace, limit, settings, alike) if same is _UNKNOWN else same
    return trace.kept[key]


def _replayed(
    trace: Trace, limit: float, settings: AllocatorSettings, alike: list[tuple[float, float, int | None]]
) -> int | None:
    """Return the most bytes reserved in a replay within `limit`; None if a block finds no place.

    Metal's allocator compares bytes with its limits, and nothing else. So the result holds for all limits between the nearest of these
    bytes. `alike` gets the lowest such limit, the one above the highest, and the result.
    """
    pools = pools_of(trace.backend, settings)
    within = _MetalWithinLimit(pools, limit) if trace.backend == "mps" else _WithinLimit(pools, limit)
    try:
        found = Replay(trace, cast("Pools", within), in_place=settings.expandable).reserved()
    except FullError:
        found = None
    if isinstance(within, _MetalWithinLimit):
        alike.append((within.limits.lowest, within.limits.highest, found))
    return found


def _unnoticed(trace: Trace, limit: float) -> float:
    """Return the reserved bytes up to which Metal's allocator works as without a limit.

    It is short of memory near the low watermark, and counts each block beside all heaps (`MetalLimits`).
    """
    largest = trace.kept.get("largest")
    if largest is None:
        sizes = (event.bytes for event in trace.events if isinstance(event, Take))
        largest = trace.kept["largest"] = max(sizes, default=0)
    return min(LOW_SHARE * limit, limit - largest) - MIB


def _limits_around(limit: float, *, below: int) -> Iterator[float]:
    """Yield the powers of `_STEP`, from `below` steps under the largest that does not exceed `limit`."""
    first = math.floor(math.log(limit) / math.log(_STEP)) - below
    yield from (_STEP**exponent for exponent in itertools.count(first))


class _WithinLimit:
    """Pools that reserve at most `limit` bytes of the machine.

    Attributes:
        pools: The pools within the limit.
        addresses: Addresses of segments, for pools that model them.

    Source:
        As hardware/simulated/allocator.py: torch's CUDACachingAllocator.cpp `malloc`.
    """

    def __init__(self, pools: Pools, limit: float) -> None:
        self.pools, self._limit = pools, limit
        self.addresses = getattr(pools, "addresses", None)
        # bound here, because a replay calls them for every block
        self.rounded, self.give_back = pools.rounded, pools.give_back

    @property
    def reserved(self) -> int:
        return self.pools.reserved

    def on_stream(self, stream: int) -> None:
        cast("CudaSegments", self.pools).on_stream(stream)

    def reuse(self, size: int) -> Block | None:
        return self.pools.reuse(size)

    def place(self, size: int, *, pressed: bool) -> Block:
        if not self._has_room(size, pressed=pressed):
            self.pools.release()
            if not self._has_room(size, pressed=pressed):
                raise FullError
        return self.pools.place(size, pressed=pressed)

    def _has_room(self, size: int, *, pressed: bool) -> bool:
        return self.reserved + self.pools.growth(size, pressed=pressed) <= self._limit

    def release(self) -> None:
        self.pools.release()


class _NotedLimits(MetalLimits):
    """Limits that note between which other limits all comparisons would give the same result.

    Attributes:
        lowest: The lowest such limit.
        highest: The lowest limit above all of them.
    """

    highest: float

    def __init__(self, high: float) -> None:
        super().__init__(high=high, low=LOW_SHARE * high)
        self._note("lowest", 0.0)
        self._note("highest", math.inf)

    @override
    def allow(self, size: int, reserved: int) -> bool:
        count = reserved + size
        if self.lowest > count:  # has been compared with more bytes
            return True
        allowed = super().allow(size, reserved=reserved)
        self._compared(count, is_below=allowed)
        return allowed

    @override
    def are_near(self, reserved: int) -> bool:
        near = super().are_near(reserved)
        self._compared((reserved + MIB) / LOW_SHARE, is_below=not near)
        return near

    @override
    def excess(self, reserved: int) -> float:
        excess = super().excess(reserved)
        if excess:  # other limits have another excess
            self._compared(cast("float", self.high), is_below=True)
            self._compared(math.nextafter(cast("float", self.high), math.inf), is_below=False)
        else:
            self._compared(reserved / LOW_SHARE, is_below=True)
        return excess

    def _compared(self, value: float, *, is_below: bool) -> None:
        if is_below:
            if value + 1 > self.lowest:
                self._note("lowest", value + 1)  # a byte for the rounding of floats
        elif value - 1 < self.highest:
            self._note("highest", value - 1)

    def _note(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)  # the class is frozen for everyone else


class _MetalWithinLimit(_WithinLimit):
    """Metal's heaps with `limit` as high watermark, and the low watermark of a run."""

    def __init__(self, pools: Pools, limit: float) -> None:
        super().__init__(pools, limit)
        self.limits = _NotedLimits(limit)
        # a block that is reused or new, and no other; bound here, because a replay calls it for every block
        self.reuse = partial(cast("MetalPools", pools).take, limits=self.limits)

    @override
    def place(self, size: int, *, pressed: bool) -> Block:
        raise FullError  # `reuse` has tried
