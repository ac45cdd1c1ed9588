"""Reserved memory of a step, by replaying its storages through an allocator model."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.memory.reserve import DetailedReplay, allocator_peak, reserved_bytes
from lightning_unified.cost_model.prediction import summarise
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.hardware.allocators.host_heap import HostHeap
from lightning_unified.hardware.allocators.metal import MetalHeaps, PlacementHeaps
from lightning_unified.hardware.allocators.pools import CudaSegments
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from tests.support.memory.allocation_replay import replay

KIB, MIB = 2**10, 2**20
POOLS = (CudaSegments, MetalHeaps, PlacementHeaps, HostHeap)


def take(pools, size):
    size = pools.rounded(size)
    return pools.reuse(size) or pools.place(size, pressed=False)


def step_of(*events, backend="cuda"):
    return Trace(events=(Work("a", "forward"), *events), rows=2, backend=backend)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(POOLS),
    st.lists(st.tuples(st.integers(1, 60 * MIB), st.booleans(), st.integers(0, 100)), max_size=60),
)
def test_pools_hold_at_least_what_is_handed_out_and_no_two_blocks_overlap(kind, asked):
    pools, live = kind(), []
    for size, ends, which in asked:
        live.append(take(pools, size))
        assert live[-1].size >= size
        if ends:
            pools.give_back(live.pop(which % len(live)))
        if kind is not HostHeap:  # its pages are resident from the first writing, so that a rest unwritten is not
            assert pools.reserved >= sum(block.size for block in live)
        if kind is not MetalHeaps:  # Metal's own addresses are not known
            ranges = sorted(
                (id(block.home) if kind is HostHeap else block.home.small, block.at, block.size) for block in live
            )
            for (home, at, size_), (other, following, _) in pairwise(ranges):
                assert home != other or at + size_ <= following


def test_a_block_freed_on_a_stream_serves_no_other_stream():
    one = Take(1, 30 * MIB, "temporaries", stream=1)
    events = (one, Give(1), Take(2, 30 * MIB, "temporaries"), Give(2))

    same = tuple(replace(event, stream=0) if isinstance(event, Take) else event for event in events)

    assert reserved_bytes(step_of(*events)) == 60 * MIB
    assert reserved_bytes(step_of(*same)) == 30 * MIB
    assert reserved_bytes(step_of(*events, backend="mps")) == reserved_bytes(step_of(*same, backend="mps"))
    assert not fits_within(step_of(*events[:1], *events[2:]), 50 * MIB)
    assert fits_within(step_of(*events), 50 * MIB), "at its limit, an allocator frees the blocks of all streams"


@pytest.mark.parametrize("backend", ["cuda", "rocm", "mps", "cpu"])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 500))
def test_what_is_reserved_is_no_less_than_what_lives(made, backend, rows):
    trace = made(rows=rows, backend=backend)
    assert reserved_bytes(trace) >= peak(trace, rounding=1).bytes


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 500))
def test_what_is_allocated_is_no_less_than_the_peak_in_whole_blocks(made, rows):
    trace = made(rows=rows)
    found = DetailedReplay(trace, CudaSegments()).peak()
    assert found.reserved >= found.allocated >= peak(trace).bytes
    assert sum(found.categories.values()) == found.allocated


def test_an_unknown_backend_is_refused(made):
    with pytest.raises(ValueError, match=r"no model of the allocator of 'xpu'; known are cuda, rocm, mps, cpu"):
        reserved_bytes(made(rows=2, backend="xpu"))


def test_the_gradients_of_a_step_become_those_of_the_step_before():
    events = [
        Take(0, 8 * MIB, "gradients"),
        Work("a", "forward"),
        Give(0),
        Work("a", "backward"),
        Take(1, 8 * MIB, "gradients"),
    ]
    assert allocator_peak(Trace(events=tuple(events), rows=2, backend="mps")).allocated == 8 * MIB


@pytest.mark.parametrize(("version", "reserved"), [((2, 13), 72 * MIB), ((2, 14), 40 * MIB)])
def test_torchs_version_decides_what_a_mac_reserves(version, reserved):
    """Two freed blocks of 6 MiB are neighbours; only the newer allocator joins them to 9 MiB.

    A heap of 8 MiB holds the scalar that Lightning compares before the first batch.
    """
    events = [Take(number, 6 * MIB, "activations") for number in range(5)]
    events += [Give(1), Give(2), Take(5, 9 * MIB, "activations")]
    trace = Trace(events=(Work("a", "forward"), *events), rows=2, backend="mps")

    assert reserved_bytes(trace, settings=AllocatorSettings(torch_version=version)) == reserved


def test_optimizer_state_is_taken_out_of_what_the_first_step_left():
    """Two segments hold the state and the activations.

    Neither is free for the other, so the next step needs a third.
    """
    events = (
        Take(0, 30 * MIB, "optimizer state"),
        Work("a", "forward"),
        Take(1, 40 * MIB, "activations"),
        Give(1),
        Work("b", "optimizer step"),
    )
    assert reserved_bytes(Trace(events=events, rows=2, backend="cuda")) == 80 * MIB


def test_a_workspace_is_taken_by_the_operation_that_first_needs_it():
    """The new block lies in the segment that the activations left.

    So the activations need another segment in the next step.
    """
    events = (
        Take(0, 32 * MIB, "workspaces", since=1),
        Work("a", "forward"),
        Take(1, 40 * MIB, "activations"),
        Give(1),
        Work("b", "forward"),
        Take(2, 2 * MIB, "temporaries"),
        Give(2),
    )
    first, later = Take(0, 32 * MIB, "workspaces"), events[1:]
    assert reserved_bytes(Trace(events=events, rows=2, backend="cuda")) == 80 * MIB
    assert reserved_bytes(Trace(events=(first, *later), rows=2, backend="cuda")) == 72 * MIB


def test_a_block_of_the_large_pool_keeps_a_rest_below_one_mebibyte():
    events = [Take(0, 20 * MIB, "logits"), Give(0), Take(1, 19 * MIB + 512, "logits"), Give(1)]
    found = allocator_peak(step_of(*events, Take(2, 20 * MIB - 512, "logits"), Give(2)))
    assert (found.allocated, found.reserved) == (20 * MIB, 20 * MIB)


def test_of_two_freed_blocks_of_one_size_the_lower_is_taken():
    pools = CudaSegments()
    blocks = [take(pools, 512) for _ in range(4)]
    pools.give_back(blocks[2])
    pools.give_back(blocks[0])
    assert take(pools, 512) is blocks[0]


def test_a_large_tensor_on_a_cpu_is_mapped_alone_and_gone_with_its_end():
    heap = HostHeap()
    block = take(heap, 100 * MIB)
    assert heap.reserved == 100 * MIB + 4 * KIB
    heap.give_back(block)
    assert heap.reserved == 0


def test_the_threshold_of_mappings_rises_to_what_was_given_back():
    heap = HostHeap()
    heap.give_back(take(heap, 20 * MIB))
    below = take(heap, 10 * MIB)  # no longer mapped: what lies before the heap's end stays when it is given back
    take(heap, 4 * KIB)
    heap.give_back(below)
    assert heap.reserved >= 10 * MIB


def test_an_aligned_block_does_not_return_to_the_hole_that_one_of_its_size_left():
    heap = HostHeap()
    heap.give_back(take(heap, 20 * MIB))
    blocks = [take(heap, 4 * MIB) for _ in range(4)]
    before = heap.reserved
    heap.give_back(blocks[1])
    take(heap, 4 * MIB)
    assert heap.reserved > before


def test_under_a_fixed_threshold_every_large_tensor_is_mapped_alone():
    heap = HostHeap(threshold=64 * KIB)
    heap.give_back(take(heap, 20 * MIB))
    block = take(heap, MIB)
    heap.give_back(block)
    assert heap.reserved == 0


def test_a_process_grows_by_little_more_than_its_tensors_under_a_fixed_threshold(made):
    trace = made(rows=100, backend="cpu")
    assert peak(trace, rounding=1).bytes <= reserved_bytes(trace, settings=AllocatorSettings(mmap_threshold=64 * KIB))
    assert (
        reserved_bytes(trace, settings=AllocatorSettings(mmap_threshold=64 * KIB))
        < 1.02 * peak(trace, rounding=1).bytes
    )


def recorded(*entries):
    """Entries of a device trace: sizes begin a block, strings end it."""
    return [
        entry
        for action, address, size in entries
        for entry in (
            [(action, address, size)]
            if action != "free"
            else [("free_requested", address, size), ("free_completed", address, size)]
        )
    ]


def test_a_record_is_replayed_to_its_two_peaks():
    events = recorded(("alloc", 1, 30 * MIB), ("alloc", 2, 100), ("free", 1, 30 * MIB), ("alloc", 3, 10 * MIB))
    assert replay(events) == (30 * MIB + 512, 32 * MIB)


def test_a_block_that_another_stream_still_uses_is_not_reused():
    events = [
        ("alloc", 1, 30 * MIB),
        ("free_requested", 1, 30 * MIB),
        ("alloc", 2, 30 * MIB),
        ("free_completed", 1, 30 * MIB),
    ]
    assert replay(events) == (30 * MIB, 60 * MIB)


def test_what_was_given_back_to_the_driver_is_asked_for_again():
    events = recorded(
        ("alloc", 1, 30 * MIB), ("free", 1, 30 * MIB), ("segment_free", 1, 30 * MIB), ("alloc", 2, 40 * MIB)
    )
    assert replay(events) == (40 * MIB, 40 * MIB)


def test_a_summary_joins_peak_allocator_and_places(made):
    found = summarise(made(rows=64), seconds=1.5, planning_seconds=0.25)
    assert found.peak_bytes == allocator_peak(made(rows=64)).allocated
    assert found.reserved_bytes == reserved_bytes(made(rows=64))
    assert sum(found.categories.values()) == found.peak_bytes
    assert (found.rows, found.num_micro_batches, found.seconds, found.planning_seconds) == (64, 1, 1.5, 0.25)
    assert found.instant == "backward of blocks.2.attention (aten.mm)"
    assert found.confidence == "high"


@pytest.mark.parametrize("backend", ["cuda", "mps", "cpu"])
def test_the_highest_place_is_the_peak_in_the_same_count(made, backend):
    found = summarise(made(rows=64, backend=backend))
    places = dict(found.instants)
    assert max(places.values()) == found.peak_bytes
    assert places[found.instant.partition(" (")[0]] == found.peak_bytes
    assert places["before the step"] < found.peak_bytes


def test_a_cpu_counts_what_tensors_asked_for(made):
    assert summarise(made(rows=3, backend="cpu")).peak_bytes == peak(made(rows=3), rounding=1).bytes
