"""MPS's allocator since torch 2.14 against its source: computed cases, and random events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.hardware.allocators.metal import MetalHeaps, MetalLimits, PlacementHeaps, metal_pools
from tests.support.memory.metal_since_2_14 import Both, MPSHeapAllocatorImpl

KIB, MIB, GIB = 2**10, 2**20, 2**30
PLENTY = MetalLimits()


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1, 256),
        (MIB, MIB),
        (MIB + 1, MIB + 32 * KIB),  # 1 MiB / 32
        (MIB + 33 * KIB, MIB + 64 * KIB),
        (3 * MIB, 3 * MIB),
        (5 * MIB + 1, 5 * MIB + 128 * KIB),
        (100 * MIB + 1, 102 * MIB),
        (10 * MIB - 1, 10 * MIB),  # aligned, it is 10 MiB already and has heaps of 1 GiB
        (10 * MIB - 300, 10 * MIB - 256),  # the bucket of 10 MiB belongs to the next class of heaps
        (512 * MIB - 300, 512 * MIB - 256),
        (700 * MIB, 704 * MIB),
        (3 * GIB + 1, 3 * GIB + 64 * MIB),
    ],
)
def test_a_large_block_is_rounded_to_a_thirty_second_of_its_magnitude(size, rounded):
    assert PlacementHeaps().rounded(size) == MPSHeapAllocatorImpl().get_allocation_size(size) == rounded


def test_a_size_is_not_rounded_to_metals_longest_buffer():
    assert PlacementHeaps(max_buffer=704 * MIB).rounded(700 * MIB) == 700 * MIB
    assert PlacementHeaps(max_buffer=705 * MIB).rounded(700 * MIB) == 704 * MIB


@pytest.mark.parametrize(
    ("size", "low", "heap"),
    [
        (KIB, None, 8 * MIB),
        (MIB, None, 8 * MIB),
        (MIB + 1, None, 32 * MIB),
        (10 * MIB, None, GIB),
        (512 * MIB - 256, None, GIB),
        (512 * MIB, None, 512 * MIB),
        (513 * MIB, None, 528 * MIB),
        (20 * MIB, MIB - 1, 20 * MIB),  # under pressure
        (21 * MIB, 0, 22 * MIB),
        (2 * MIB, 0, 32 * MIB),
        (KIB, 0, 8 * MIB),
    ],
)
def test_a_heap_has_the_size_of_its_blocks_class(size, low, heap):
    both = Both(low=low)
    both.take(size)

    assert both.model.reserved == heap


def test_blocks_lie_one_after_the_other_in_the_first_heap_with_room():
    both = Both()

    assert [both.take(12 * MIB), both.take(20 * MIB), both.take(5 * MIB), both.take(12 * MIB)] == [
        (1, 0, 12 * MIB),
        (1, 12 * MIB, 20 * MIB),
        (1, 32 * MIB, 5 * MIB),  # heaps of all large classes are one pool
        (1, 37 * MIB, 12 * MIB),
    ]
    assert both.model.reserved == GIB


def test_small_and_large_blocks_never_share_a_heap():
    both = Both()
    both.take(2 * MIB)

    assert both.take(MIB) == (2, 0, MIB)
    assert both.model.reserved == 40 * MIB


def test_a_freed_block_is_split_at_a_smaller_request():
    both = Both()
    for size in (8 * MIB, 8 * MIB, 8 * MIB, 8 * MIB):
        both.take(size)
    both.free(1)

    assert [both.take(3 * MIB), both.take(5 * MIB)] == [(1, 8 * MIB, 3 * MIB), (1, 11 * MIB, 5 * MIB)]
    assert both.model.reserved == 32 * MIB


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (8 * MIB, 7 * MIB + 256 * KIB, 8 * MIB),  # less than 1 MiB would remain
        (8 * MIB, 7 * MIB, 7 * MIB),
        (MIB, MIB - 256, MIB - 256),  # a small block leaves 256 bytes
    ],
)
def test_a_remainder_below_the_least_stays_in_the_block(first, second, counts):
    both = Both()
    both.take(first)
    both.free(0)

    assert both.take(second) == (1, 0, counts)


def test_a_fitting_buffer_is_reused_before_a_smaller_free_range():
    both = Both()
    for size in (24 * MIB, 6 * MIB):  # the rest of the first heap, 1,000 MiB, has no buffer
        both.take(size)
    both.take(993 * MIB)  # a heap of its own
    both.take(987 * MIB)  # leaves 7 MiB without a buffer in the first heap
    both.free(1)

    assert both.take(5 * MIB + 512 * KIB) == (1, 24 * MIB, 6 * MIB)


def test_a_buffer_with_a_remainder_is_no_better_than_a_smaller_free_range():
    both = Both()
    for size in (6 * MIB, 2 * MIB, 18 * MIB + 512 * KIB):
        both.take(size)  # 5.5 MiB remain without a buffer
    both.free(0)

    assert both.take(5 * MIB) == (1, 26 * MIB + 512 * KIB, 5 * MIB + 512 * KIB)


def test_of_two_ranges_that_fit_the_smaller_is_split():
    both = Both()
    for size in (9 * MIB, 2 * MIB, 6 * MIB, 2 * MIB, 13 * MIB):
        both.take(size)
    both.free(2)
    both.free(0)

    assert both.take(3 * MIB) == (1, 11 * MIB, 3 * MIB)


def test_freed_neighbours_are_joined_only_when_nothing_else_fits():
    both = Both()
    for size in (8 * MIB, 6 * MIB, 8 * MIB, 8 * MIB):
        both.take(size)
    both.free(0)
    both.free(0)
    small = both.take(7 * MIB)  # cut from the first, not from both

    assert small == (1, 0, 7 * MIB)
    assert both.take(2 * MIB) == (1, 30 * MIB, 2 * MIB)  # the end of the heap is the smallest that fits
    assert both.take(7 * MIB) == (1, 7 * MIB, 7 * MIB)  # 1 and 6 MiB
    assert both.model.reserved == 32 * MIB


def test_a_joined_range_is_split_again_and_its_rest_is_free():
    both = Both()
    for _ in range(4):
        both.take(8 * MIB)
    for _ in range(3):
        both.free(0)

    assert [both.take(17 * MIB), both.take(7 * MIB)] == [(1, 0, 17 * MIB), (1, 17 * MIB, 7 * MIB)]
    assert both.model.reserved == 32 * MIB


def test_after_a_request_that_no_range_fits_a_smaller_one_still_joins_neighbours():
    both = Both()
    for _ in range(8):
        both.take(4 * MIB)
    for index in (0, 0, 1):  # 8 MiB side by side, and 4 elsewhere
        both.free(index)

    assert [both.take(9 * MIB), both.take(23 * MIB), both.take(7 * MIB)] == [
        (2, 0, 9 * MIB),
        (2, 9 * MIB, 23 * MIB),
        (1, 0, 7 * MIB),
    ]


def test_free_ranges_around_a_live_block_do_not_join():
    both = Both()
    for _ in range(4):
        both.take(8 * MIB)
    both.free(0)
    both.free(1)

    assert both.take(9 * MIB) == (2, 0, 9 * MIB)
    assert both.model.reserved == 64 * MIB


def test_ranges_are_joined_in_the_oldest_heap():
    both = Both()
    for _ in range(8):
        both.take(8 * MIB)
    for index in (4, 4, 0, 0):  # two of the second heap, then two of the first
        both.free(index)

    assert both.take(9 * MIB) == (1, 0, 9 * MIB)


def test_only_heaps_without_a_live_block_return_to_the_driver():
    both = Both()
    for _ in range(8):
        both.take(8 * MIB)
    for _ in range(5):
        both.free(0)
    both.empty_cache()

    assert both.model.reserved == 32 * MIB
    for _ in range(3):
        both.free(0)
    both.empty_cache()
    assert both.model.reserved == 0


def test_above_the_low_watermark_the_oldest_unused_heaps_are_collected():
    both = Both(low=128 * MIB)
    for _ in range(20):
        both.take(8 * MIB)  # five heaps
    for _ in range(12):
        both.free(0)  # three of them

    assert both.take(40 * MIB)[0] == 6  # collected: one heap, which are the 32 MiB above the mark
    assert both.model.reserved == 160 * MIB - 32 * MIB + 40 * MIB


def test_nothing_is_collected_for_a_block_as_large_as_all_that_is_free():
    both = Both(low=128 * MIB)
    for _ in range(20):
        both.take(8 * MIB)
    for _ in range(5):
        both.free(0)  # 32 MiB of one heap, 8 of the next

    both.take(40 * MIB)
    assert both.model.reserved == 160 * MIB + 40 * MIB


def test_at_the_high_watermark_only_as_many_heaps_as_needed_return_first():
    both = Both(high=140 * MIB)
    for _ in range(12):
        both.take(8 * MIB)
    for _ in range(12):
        both.free(0)

    assert both.take(50 * MIB) == (4, 0, 50 * MIB)  # two of three heaps for one of 1 GiB: Metal compares the block
    assert both.model.reserved == 32 * MIB + GIB


def test_at_the_high_watermark_even_a_fitting_buffer_is_refused_until_heaps_return():
    both = Both(high=70 * MIB)
    for size in (*[6 * MIB] * 10, KIB):  # two heaps of 32 MiB, one of 8
        both.take(size)
    both.free(0)

    assert both.take(6 * MIB) is None
    for _ in range(5):
        both.free(4)  # the second heap
    assert both.take(6 * MIB) == (4, 0, 6 * MIB)


def test_a_buffer_is_reused_once_heaps_of_the_other_pool_made_room():
    both = Both(high=44 * MIB)
    for size in (*[6 * MIB] * 5, KIB):
        both.take(size)
    both.free(5)  # the small heap
    both.free(1)

    assert both.take(6 * MIB) == (1, 6 * MIB, 6 * MIB)
    assert both.model.reserved == 32 * MIB


def test_the_drivers_other_bytes_count_towards_both_watermarks():
    assert Both(high=20 * MIB).take(12 * MIB) is not None
    assert Both(high=20 * MIB, others=9 * MIB).take(12 * MIB) is None
    pressed = Both(low=20 * MIB, others=20 * MIB)
    pressed.take(12 * MIB)
    assert pressed.model.reserved == 12 * MIB


SIZES = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 2 * MIB),
    st.integers(1, 64 * MIB),
    st.integers(1, 900 * MIB),
    st.sampled_from([KIB, MIB - 256, MIB, MIB + 1, 2 * MIB, 5 * MIB, 10 * MIB - 256, 10 * MIB, 33 * MIB, 512 * MIB]),
)
EVENTS = st.lists(st.tuples(st.sampled_from("ttttfffe"), SIZES), max_size=80)


@settings(max_examples=150, deadline=None)
@given(
    EVENTS,
    st.one_of(st.none(), st.integers(1, 3 * GIB)),
    st.one_of(st.none(), st.integers(1, 3 * GIB)),
    st.sampled_from([0, 384 * KIB, 50 * MIB]),
    st.sampled_from([None, 800 * MIB]),
)
def test_whatever_is_taken_and_freed_the_model_follows_the_source(events, high, low, others, max_buffer):
    both = Both(high=high, low=low, others=others, max_buffer=max_buffer)
    for kind, size in events:
        if kind == "e":
            both.empty_cache()
        elif kind == "f" and both.live:
            both.free(size % len(both.live))
        elif kind == "t":
            both.take(size)
    for _ in range(len(both.live)):
        both.free(0)
    both.empty_cache()
    assert both.model.reserved == 0


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_without_limits_a_replay_reserves_what_the_source_reserves(events):
    pools, source, live = PlacementHeaps(), MPSHeapAllocatorImpl(), []
    most = 0
    for kind, size in events:
        if kind == "t":
            rounded = pools.rounded(size)
            live.append((pools.reuse(rounded) or pools.place(rounded, pressed=False), source.malloc(size)))
        elif live:
            mine, theirs = live.pop(size % len(live))
            pools.give_back(mine)
            source.free(theirs)
        most = max(most, pools.reserved)
    assert most == source.peak_total_allocated_memory


@pytest.mark.parametrize(
    ("version", "kind"),
    [((2, 11), MetalHeaps), ((2, 13), MetalHeaps), ((2, 14), PlacementHeaps), ((3, 0), PlacementHeaps)],
)
def test_torchs_version_decides_the_allocator(version, kind):
    assert type(metal_pools(version)) is kind


def test_lengths_that_vary_reserve_less_since_2_14():
    """A growing sequence, as in the pull request that changed the allocator."""
    reserved = {}
    for version in ((2, 13), (2, 14)):
        pools, held = metal_pools(version), []
        for length in range(20, 60):
            held = [pools.take(pools.rounded(length * 300 * KIB * factor), PLENTY) for factor in (1, 2, 4)]
            for block in held:
                pools.give_back(block)
        reserved[version] = pools.reserved

    assert reserved[2, 14] == GIB + 32 * MIB
    assert reserved[2, 13] > 2 * GIB
