"""Estimate reserved memory: replay a trace through a model of the backend's allocator.

Reserved bytes exceed live bytes, because an allocator rounds sizes, keeps freed blocks and cannot always split or merge them.
How much more depends on the order of allocations, so no factor on the live peak predicts it. The method:

1. Start empty pools (`hardware/allocators`): CUDA's segments, Metal's heaps, or glibc's heap on a CPU.
2. Replay the first step of the run: weights and buffers first, gradients in its backward pass, library workspaces at the
   first operation that needs them, optimizer state at the first optimizer step.
3. Replay steady steps, which reuse the blocks the first one left.
4. Take the largest allocated and reserved bytes seen.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from typing_extensions import override

from lightning_unified.cost_model.memory.moves import Move, Moves
from lightning_unified.cost_model.trace.trace import CATEGORIES, Category, Take, Trace, Work
from lightning_unified.hardware.allocators.addresses import Addresses
from lightning_unified.hardware.allocators.expandable import ExpandableSegments
from lightning_unified.hardware.allocators.host_heap import HostHeap
from lightning_unified.hardware.allocators.metal import metal_pools
from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Pools
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.hardware.sources import installed_torch

__all__ = ["AllocatorPeak", "DetailedReplay", "FullError", "Replay", "allocator_peak", "pools_of", "reserved_bytes"]

_STEADY_STEPS = 2
_LASTING = ("weights", "buffers")
_PACKED = ("gradients", "optimizer state")
_DEFAULT = AllocatorSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorPeak:
    """Peaks of an allocator over the steps of a run.

    Attributes:
        allocated: Peak of bytes in blocks, comparable with `max_memory_allocated`; a block can be larger than its tensor.
        reserved: Peak of bytes taken from the device, comparable with `max_memory_reserved`; on a CPU the growth of the
            process.
        categories: `allocated` by category.
        index: Index of the event after which `allocated` is reached.
        levels: Most bytes in blocks after each event of the trace, over all steps; `allocated` is the largest.
    """

    allocated: int
    reserved: int
    categories: dict[Category, int]
    index: int
    levels: tuple[int, ...]


def reserved_bytes(trace: Trace, *, settings: AllocatorSettings = _DEFAULT) -> int:
    """Return the peak of bytes that the allocator reserves for the steps of a run like `trace`.

    These are CUDA's and HIP's segments, Metal's heaps, or resident memory on a CPU. Memory of libraries and drivers is not
    included. Arguments and errors are those of `allocator_peak`.
    """
    return allocator_peak(trace, settings=settings).reserved


def allocator_peak(trace: Trace, *, settings: AllocatorSettings = _DEFAULT) -> AllocatorPeak:
    """Replay a run's first step and two steady ones, and return the allocator's peaks.

    The first step begins with weights and buffers only. Gradients come with its backward pass, libraries take their
    workspaces at the first operation that needs one, and the first optimizer step takes the optimizer's state from the blocks
    that activations left. That order decides how the pools are split afterwards. In segments that expand, the gradients of split batches
    stay at low addresses after the first step.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    key = "allocator", settings
    if key not in trace.kept:
        trace.kept[key] = DetailedReplay(trace, pools_of(trace.backend, settings), in_place=settings.expandable).peak()
    return trace.kept[key]


def pools_of(backend: str, settings: AllocatorSettings = _DEFAULT) -> Pools:
    """Return empty pools of a backend's allocator.

    Raises:
        ValueError: If there is no model of it.
    """
    kinds: dict[str, Callable[[], Pools]] = {
        "cuda": ExpandableSegments if settings.expandable else CudaSegments,
        "rocm": CudaSegments,
        "mps": lambda: metal_pools(settings.torch_version or installed_torch()),
        "cpu": lambda: HostHeap(threshold=settings.mmap_threshold),
    }
    if backend not in kinds:
        raise ValueError(f"there is no model of the allocator of {backend!r}; known are {', '.join(kinds)}.")
    return kinds[backend]()


class FullError(Exception):
    """No place is left for a block within a limit."""


class Replay:
    """Replay of a run's first steps in given pools, for the bytes that these reserve.

    Args:
        trace: A step in steady state.
        pools: Empty pools.
        in_place: Whether gradients of split batches keep their memory after the first step, as they do in segments that expand.
    """

    def __init__(self, trace: Trace, pools: Pools, *, in_place: bool = False) -> None:
        self._pools, self._is_metal, moves = pools, trace.backend == "mps", Moves.of(trace)
        self._counted: Pools = getattr(pools, "pools", pools)  # whose bytes a limit counts
        self._reuse = pools.reuse  # bound here, because a replay calls it for every block
        self._addresses: Addresses | None = getattr(pools, "addresses", None)
        self._stream, self._has_streams = 0, trace.backend in ("cuda", "rocm")
        self._beginnings, self._first, self._setup, self._step = moves.beginnings, moves.first, moves.setup, moves.step
        self._first_moves, self._steady_moves = moves.moves, moves.in_place if in_place else moves.moves
        self._takes, self._renewed = moves.takes, moves.renewed
        self._rounded: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self._reserved = 0

    def reserved(self) -> int:
        """Replay the steps and return the peak of reserved bytes."""
        self._run()
        return self._reserved

    def _run(self) -> None:
        beginnings = self._beginnings
        later = self._renewed.union(take.storage for takes in beginnings.values() for take in takes)
        first = [take for take in self._setup if take.storage not in later]
        self._take_all(take for take in first if take.category in _LASTING)
        if self._addresses is not None:
            self._addresses.compute()
        if self._is_metal:
            self._leave_scalar()
        self._take_all(take for take in first if take.category not in _LASTING)
        self._replay(self._first_moves, beginnings)
        for step in range(_STEADY_STEPS):
            self._carry_over()
            if step == 0 and self._steady_moves is not self._first_moves:
                self._pack()
            self._replay(self._steady_moves, {})

    def _leave_scalar(self) -> None:
        """Free the block of a scalar that Lightning compares on the device before the first batch.

        It is the length of a loader.

        Metal reuses blocks whole until torch 2.13: this one decides which larger block a later scalar gets, and so on.
        """
        size = self._pools.rounded(1)
        self._pools.give_back(self._pools.reuse(size) or self._pools.place(size, pressed=False))

    def _replay(self, moves: Iterable[Move], beginnings: Mapping[int, list[Take]]) -> None:
        """Replay one step; the storages in `beginnings` begin before the event that is their key."""
        due, take, blocks = sorted(beginnings, reverse=True), self._take, self._blocks
        freed, give_back, reuse, place = blocks.pop, self._pools.give_back, self._reuse, self._pools.place
        rounded, counted, held = self._rounded, self._counted, 0
        is_plain = self._addresses is None and not self._has_streams
        for at, storage, taken in moves:
            while due and due[-1] <= at:
                self._take_all(beginnings[due.pop()])
            if taken is None:
                block = freed(storage, None)
                if block is not None:
                    give_back(block)
            elif is_plain and (size := rounded.get(taken.bytes)):
                # as `_take`, without a call for each of a million blocks
                blocks[storage] = reuse(size) or place(size, pressed=False)
                if counted.reserved != held:
                    held = counted.reserved
                    self._reserved = max(self._reserved, held)
            else:
                take(taken)
        for last in reversed(due):
            if last < len(self._step):
                self._take_all(beginnings[last])

    def _carry_over(self) -> None:
        """Rename a step's remaining storages, e.g. gradients, to those at the next step's begin."""
        own = {take.storage for take in self._setup}
        left: dict[tuple[Category, int], deque[int]] = defaultdict(deque)
        for take in (self._takes[storage] for storage in self._blocks if storage not in own):
            left[take.category, take.bytes].append(take.storage)
        missing = [take for take in self._setup if take.storage not in self._blocks]
        for take in missing:
            same = left[take.category, take.bytes]
            if same:
                self._blocks[take.storage] = self._blocks.pop(same.popleft())
        for storages in left.values():
            for storage in storages:
                self._give(storage)
        self._take_all(take for take in missing if take.storage not in self._blocks)

    def _pack(self) -> None:
        """Move gradients and optimizer state to lower addresses, as a run does after its first step."""
        pools, left = self._pools, list[Block]()
        pools.release()
        movable = [one for one in self._blocks.items() if self._takes[one[0]].category in _PACKED]
        for storage, block in sorted(movable, key=lambda one: one[1].at, reverse=True):
            if block.home.small:
                continue
            try:
                copy = pools.reuse(block.size) or pools.place(block.size, pressed=False)
            except FullError:
                break
            if copy.at < block.at:
                left.append(block)
                self._blocks[storage] = copy
            else:
                pools.give_back(copy)
        for block in left:
            pools.give_back(block)
        pools.release()

    def _take_all(self, takes: Iterable[Take]) -> None:
        for take in takes:
            self._take(take)

    def _take(self, take: Take) -> Block | None:
        """Place a storage and return its block; an empty storage has none."""
        count = take.bytes
        if not count:
            return None
        if self._addresses is not None and take.category == "workspaces":
            self._addresses.multiply()
        if self._has_streams and take.stream != self._stream:
            self._stream = take.stream
            cast("CudaSegments", self._pools).on_stream(take.stream)
        size = self._rounded.get(count)
        if size is None:
            size = self._rounded[count] = self._pools.rounded(count)
        block = self._blocks[take.storage] = self._reuse(size) or self._pools.place(size, pressed=False)
        self._reserved = max(self._reserved, self._counted.reserved)
        return block

    def _give(self, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        if block is not None:
            self._pools.give_back(block)


class DetailedReplay(Replay):
    """Replay that also counts the bytes in blocks, by category and after each event."""

    def __init__(self, trace: Trace, pools: Pools, *, in_place: bool = False) -> None:
        super().__init__(trace, pools, in_place=in_place)
        self._live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._total = self._most = self._index = self._last = self._at = 0
        self._at_most: dict[Category, int] = {}
        self._levels = [0] * len(trace.events)

    def peak(self) -> AllocatorPeak:
        """Replay the steps and return the allocator's peaks."""
        self._run()
        self._note_peak()
        categories: dict[Category, int] = {category: count for category, count in self._at_most.items() if count}
        return AllocatorPeak(
            allocated=self._most,
            reserved=self._reserved,
            categories=categories,
            index=self._index,
            levels=self._all_levels(),
        )

    @override
    def _replay(self, moves: Iterable[Move], beginnings: Mapping[int, list[Take]]) -> None:
        due, first, levels = sorted(beginnings, reverse=True), self._first, self._levels
        take, freed, give_back, live, takes = (
            super()._take,
            self._blocks.pop,
            self._pools.give_back,
            self._live,
            self._takes,
        )
        self._note_level(-1)
        for at, storage, taken in moves:
            while due and due[-1] <= at:
                self._take_all(beginnings[due.pop()])
                self._note_level(at)
            if taken is not None:
                block = take(taken)
                if block is not None:
                    live[taken.category] += block.size
                    self._total += block.size
                    self._last = first + at
            elif (block := freed(storage, None)) is not None:
                if self._total > self._most:
                    self._note_peak()
                live[takes[storage].category] -= block.size
                self._total -= block.size
                give_back(block)
            levels[first + at] = max(levels[first + at], self._total)
        for last in reversed(due):
            if last < len(self._step):
                self._take_all(beginnings[last])
                self._note_level(last)

    def _note_level(self, at: int) -> None:
        """Note the bytes in blocks after event `at` of the step; -1 is the last event before it."""
        index = self._first + at
        if index >= 0:
            self._levels[index] = max(self._levels[index], self._total)

    def _all_levels(self) -> tuple[int, ...]:
        """Return the noted levels; operations keep the level of the event before them."""
        setup = max(self._first, 1)
        levels = self._levels[setup - 1 : setup] * setup + self._levels[setup:]
        for index in range(setup, len(levels)):
            if isinstance(self._step[index - self._first], Work):
                levels[index] = levels[index - 1]
        return tuple(levels)

    def _note_peak(self) -> None:
        """Record the bytes in blocks if they are a new maximum.

        Call it before a block is freed, and at the end.
        """
        if self._total > self._most:
            self._most, self._index, self._at_most = self._total, self._last, dict(self._live)

    @override
    def _take(self, take: Take) -> Block | None:
        block = super()._take(take)
        if block is not None:
            self._live[take.category] += block.size
            self._total += block.size
            self._last = 0
        return block

    @override
    def _give(self, storage: int) -> None:
        block = self._blocks.get(storage)
        if block is not None:
            if self._total > self._most:
                self._note_peak()
            self._live[self._takes[storage].category] -= block.size
            self._total -= block.size
            super()._give(storage)
