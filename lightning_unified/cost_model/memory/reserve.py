"""From what lives to what the machine gives: a step's storages replayed through a model of its backend's allocator."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from lightning_unified.cost_model.trace.trace import CATEGORIES, Category, Take, Trace, Work
from lightning_unified.hardware.allocators.addresses import Addresses
from lightning_unified.hardware.allocators.expandable import ExpandableSegments
from lightning_unified.hardware.allocators.host_heap import HostHeap
from lightning_unified.hardware.allocators.pools import Block, CudaSegments, MetalHeaps, Pools
from lightning_unified.units import MIB

__all__ = ["Held", "Run", "held", "pools_of", "replay", "reserved_bytes"]

_STEADY_STEPS = 2
_LASTING = ("weights", "buffers")
_GIVEN_BACK = ("segment_free", "segment_unmap")
_CUBLAS_WORKSPACE = 32 * MIB  # of the generations that recordings are of


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What an allocator handed out and held for a step.

    Attributes:
        allocated: The most in blocks at once, as `max_memory_allocated` counts it: a block can be larger than its tensor.
        reserved: The most taken of the device, as `max_memory_reserved` counts it; on a CPU what the process grew by.
        categories: `allocated` by what it is for.
        index: Of the event after which that is allocated.
    """

    allocated: int
    reserved: int
    categories: dict[Category, int]
    index: int


def reserved_bytes(
    trace: Trace, *, backend: str | None = None, expandable_segments: bool = False, mmap_threshold: int | None = None
) -> int:
    """Return the most that the allocator takes of the machine for the steps of a run like `trace`.

    Args:
        trace: A step in steady state.
        backend: Whose allocator; None is the trace's own.
        expandable_segments: Whether CUDA's allocator was told to use segments that grow.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Returns:
        Bytes: CUDA's and HIP's segments, Metal's heaps, resident memory on a CPU. Libraries' and drivers' own is not in it.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    found = held(trace, backend=backend, expandable_segments=expandable_segments, mmap_threshold=mmap_threshold)
    return found.reserved


def held(
    trace: Trace, *, backend: str | None = None, expandable_segments: bool = False, mmap_threshold: int | None = None
) -> Held:
    """Replay a run's first step and then steady ones, and return what the allocator handed out and held.

    The first step begins with weights and buffers only: gradients come with its backward pass, libraries take their workspaces at the first
    operation that needs one, and what an optimizer keeps is taken when it first steps, out of what the activations left. That order
    decides how the pools are cut up afterwards.

    Args:
        trace: A step in steady state.
        backend: Whose allocator; None is the trace's own.
        expandable_segments: Whether CUDA's allocator was told to use segments that grow.
        mmap_threshold: On a CPU, the bytes of `M_MMAP_THRESHOLD` if it was set; None is the C library's own, which moves.

    Raises:
        ValueError: If there is no model of the backend's allocator.
    """
    pools = pools_of(backend or trace.backend, expandable_segments=expandable_segments, mmap_threshold=mmap_threshold)
    return Run(trace, pools).held()


def pools_of(backend: str, *, expandable_segments: bool = False, mmap_threshold: int | None = None) -> Pools:
    """Return the empty pools of a backend's allocator; the arguments are those of `held`."""
    segments = ExpandableSegments if expandable_segments else CudaSegments
    kinds: dict[str, Callable[[], Pools]] = {
        "cuda": segments,
        "rocm": segments,
        "mps": MetalHeaps,
        "cpu": partial(HostHeap, threshold=mmap_threshold),
    }
    if backend not in kinds:
        raise ValueError(f"there is no model of the allocator of {backend!r}; known are {', '.join(kinds)}.")
    return kinds[backend]()


class Run:
    """A run's first steps in the pools."""

    def __init__(self, trace: Trace, pools: Pools) -> None:
        self._pools = pools
        self._addresses: Addresses | None = getattr(pools, "addresses", None)
        works = (
            index for index, event in enumerate(trace.events) if isinstance(event, Work) and event.phase != "setup"
        )
        begin = next(works, len(trace.events))
        self._first = begin
        self._setup = [event for event in trace.events[:begin] if isinstance(event, Take)]
        self._step = trace.events[begin:]
        self._moves = [(at, event) for at, event in enumerate(self._step) if not isinstance(event, Work)]
        self._takes = {event.storage: event for event in trace.events if isinstance(event, Take)}
        self._blocks: dict[int, Block] = {}
        self._live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._total = self._most = self._index = self._reserved = 0
        self._at_most: dict[Category, int] = {}

    def held(self) -> Held:
        """Replay the steps and return what was most."""
        beginnings = self._beginnings()
        later = {take.storage for takes in beginnings.values() for take in takes}
        first = [take for take in self._setup if take.category != "gradients" and take.storage not in later]
        self._take_all(take for take in first if take.category in _LASTING)
        if self._addresses is not None:
            self._addresses.compute()
        self._take_all(take for take in first if take.category not in _LASTING)
        self._replay(beginnings)
        for _ in range(_STEADY_STEPS):
            self._carry_over()
            self._replay({})
        categories: dict[Category, int] = {category: count for category, count in self._at_most.items() if count}
        return Held(allocated=self._most, reserved=self._reserved, categories=categories, index=self._index)

    def _beginnings(self) -> dict[int, list[Take]]:
        """Return what the first step is the first to take, by the event before which it does: an optimizer's state, libraries' workspaces."""
        works = [index for index, event in enumerate(self._step) if isinstance(event, Work)]
        found: dict[int, list[Take]] = defaultdict(list)
        for take in self._setup:
            if take.since is not None and take.since < len(works):
                after = range(works[take.since] + 1, len(self._step))
                found[next((at for at in after if not isinstance(self._step[at], Take)), len(self._step))].append(take)
        steps = next((at for at in works if self._step[at].phase == "optimizer step"), None)  # type: ignore[union-attr]
        if steps is not None:
            found[steps] += [take for take in self._setup if take.category == "optimizer state"]
        return found

    def _replay(self, beginnings: Mapping[int, list[Take]]) -> None:
        """Go through one step; `beginnings` begin to live before the events that they are named by."""
        due = sorted(beginnings, reverse=True)
        for at, event in self._moves:
            while due and due[-1] <= at:
                self._take_all(beginnings[due.pop()])
            if isinstance(event, Take):
                self._take(event, index=self._first + at)
            else:
                self._give(event.storage)
        for last in reversed(due):
            if last < len(self._step):
                self._take_all(beginnings[last])

    def _carry_over(self) -> None:
        """Let what a step left be what the next begins with: the gradients it made are those of the step before."""
        own = {take.storage for take in self._setup}
        left: dict[tuple[Category, int], list[int]] = defaultdict(list)
        for take in (self._takes[storage] for storage in self._blocks if storage not in own):
            left[take.category, take.bytes].append(take.storage)
        missing = [take for take in self._setup if take.storage not in self._blocks]
        for take in missing:
            same = left[take.category, take.bytes]
            if same:
                self._blocks[take.storage] = self._blocks.pop(same.pop())
        for storages in left.values():
            for storage in storages:
                self._give(storage)
        self._take_all(take for take in missing if take.storage not in self._blocks)

    def _take_all(self, takes: Iterable[Take]) -> None:
        for take in takes:
            self._take(take, index=0)

    def _take(self, take: Take, *, index: int) -> None:
        if not take.bytes:
            return
        if take.category == "workspaces" and self._addresses is not None:
            self._addresses.multiply()
        size = self._pools.rounded(take.bytes)
        block = self._pools.reuse(size) or self._pools.place(size, pressed=False)
        self._blocks[take.storage] = block
        self._live[take.category] += block.size
        self._total += block.size
        self._reserved = max(self._reserved, self._pools.reserved)
        if self._total > self._most:
            self._most, self._index, self._at_most = self._total, index, dict(self._live)

    def _give(self, storage: int) -> None:
        block = self._blocks.pop(storage, None)
        if block is not None:
            self._live[self._takes[storage].category] -= block.size
            self._total -= block.size
            self._pools.give_back(block)


def replay(
    events: Iterable[tuple[str, int, int]], *, expandable_segments: bool | None = None, weights: int | None = None
) -> tuple[int, int]:
    """Replay what `torch.cuda.memory._snapshot()["device_traces"]` recorded on one stream, from the first allocation on.

    Args:
        events: `action`, `addr` and `size` of each entry. Allocations and their ends are replayed; of what the allocator did
            itself, only that it gave free segments back.
        expandable_segments: Whether segments grew; None looks for an entry that says so.
        weights: How many allocations there are before anything is computed; None for those before the first that ends. cuBLAS's first product
            is taken to be where its workspace of 32 MiB is.

    Returns:
        The most allocated and the most reserved, in bytes, by the model of the allocator.
    """
    entries = list(events)
    if expandable_segments is None:
        expandable_segments = any(action == "segment_map" for action, _, _ in entries)
    pools = ExpandableSegments() if expandable_segments else CudaSegments()
    blocks: dict[int, Block] = {}
    allocated, most, reserved, count, before = 0, 0, 0, 0, ""
    first = _first_that_ends(entries) if weights is None else weights
    for action, address, size in entries:
        if action == "alloc" and size:
            if count >= first:
                (pools.addresses.multiply if size == _CUBLAS_WORKSPACE else pools.addresses.compute)()
            count += 1
            rounded = pools.rounded(size)
            block = blocks[address] = pools.reuse(rounded) or pools.place(rounded, pressed=False)
            allocated += block.size
            most, reserved = max(most, allocated), max(reserved, pools.reserved)
        elif action == "free_requested" and address in blocks:
            allocated -= blocks[address].size
        elif action == "free_completed" and address in blocks:
            pools.give_back(blocks.pop(address))
        elif action in _GIVEN_BACK and before not in _GIVEN_BACK:
            pools.release()
        before = action
    return most, reserved


def _first_that_ends(entries: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of allocations before the first block of all to end."""
    actions = [action for action, _, size in entries if action == "free_requested" or (action == "alloc" and size)]
    return max(actions.index("free_requested") - 1, 0) if "free_requested" in actions else len(actions)
