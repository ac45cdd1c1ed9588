"""CUDA's allocator with expandable segments: computed cases, and random events."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.hardware.allocators.expandable import ExpandableSegments
from lightning_unified.hardware.allocators.pools import CudaSegments

KIB, MIB = 2**10, 2**20
SMALL, LARGE = 2 * MIB, 20 * MIB


@pytest.fixture
def pools():
    return ExpandableSegments()


def take(pools, size):
    rounded = pools.rounded(size)
    return pools.reuse(rounded) or pools.place(rounded, pressed=False)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], SMALL),
        ([MIB, MIB], SMALL),
        ([MIB, MIB, 1], 2 * SMALL),
        ([MIB + 1], LARGE),
        ([15 * MIB, 15 * MIB], 2 * LARGE),  # the second begins in the first page
        ([100 * MIB, 1], 100 * MIB + SMALL),
        ([101 * MIB, 19 * MIB], 120 * MIB),
    ],
)
def test_pages_are_mapped_where_blocks_need_them(pools, sizes, reserved):
    for size in sizes:
        take(pools, size)

    assert pools.reserved == reserved


def test_streams_have_ranges_of_their_own(pools):
    take(pools, 5 * MIB)
    pools.on_stream(7)
    take(pools, 5 * MIB)

    assert pools.reserved == 2 * LARGE


def test_a_block_grows_into_pages_behind_a_freed_one(pools):
    first, _ = take(pools, 100 * MIB), pools.reserved
    pools.give_back(first)
    grown = take(pools, 130 * MIB)

    assert (grown.at, pools.reserved) == (0, 140 * MIB)


def test_the_last_freed_block_is_taken_after_all_others(pools):
    first, between, last = (take(pools, size) for size in (60 * MIB, 20 * MIB, 40 * MIB))
    assert between.used
    for one in (first, last):
        pools.give_back(one)

    assert take(pools, 30 * MIB).at == 0  # the other block has 40 MiB, and no end


def test_memory_between_blocks_goes_back_to_the_driver_page_by_page(pools):
    blocks = [take(pools, 30 * MIB) for _ in range(4)]
    for one in blocks[1:3]:
        pools.give_back(one)
    pools.release()

    assert pools.reserved == 80 * MIB  # of the freed bytes from 30 to 90 MiB, the pages from 40 to 80 MiB
    assert take(pools, 45 * MIB).at == 30 * MIB
    assert pools.reserved == 120 * MIB


@pytest.mark.parametrize(("kind", "reserved"), [(ExpandableSegments, 400 * MIB), (CudaSegments, 600 * MIB)])
def test_freed_memory_in_pieces_serves_a_larger_block(kind, reserved):
    pools = kind()
    pools.give_back(take(pools, 400 * MIB))
    pieces = [take(pools, 40 * MIB) for _ in range(10)]
    for one in pieces[::2]:
        pools.give_back(one)
    pools.release()
    take(pools, 200 * MIB)

    assert pools.reserved == reserved


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(9, 26), st.integers(0, 10**6)), max_size=120))
def test_blocks_never_overlap_and_pages_are_counted(events):
    pools, live = ExpandableSegments(), []
    for kind, exponent, number in events:
        if kind < 5 or not live:
            pools.on_stream(number % 2)
            live.append(take(pools, 2**exponent + number))
        elif kind < 9:
            pools.give_back(live.pop(number % len(live)))
        else:
            pools.release()
        places = sorted((one.home.stream, one.home.small, one.at, one.at + one.size) for one in live)
        for (*range_, _, end), (*other, begin, _) in itertools.pairwise(places):
            assert range_ != other or end <= begin
        assert sum(one.size for one in live) <= pools.reserved
    for one in live:
        pools.give_back(one)
    pools.release()

    assert pools.reserved == 0
