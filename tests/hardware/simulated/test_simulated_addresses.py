"""Addresses of CUDA's segments, compared with recordings of a GPU."""

from lightning_unified.hardware.allocators.addresses import Addresses
from lightning_unified.units import MIB


def test_large_segments_lie_below_each_other_in_whole_pages():
    addresses = Addresses()
    assert [addresses.place(size * MIB) // MIB for size in (392, 492, 64)] == [-416, -928, -992]


def test_small_segments_fill_what_larger_ones_left_from_the_lowest_on():
    addresses = Addresses()
    addresses.place(40 * MIB)
    addresses.place(50 * MIB)
    assert [addresses.place(size * MIB) // MIB for size in (2, 12, 12, 20)] == [-78, -76, -24, 488]


def test_a_kernel_that_ran_leaves_room_for_segments_of_middle_size():
    addresses = Addresses()
    assert addresses.place(100 * MIB) == -128 * MIB
    addresses.compute()
    addresses.compute()
    assert [addresses.place(size * MIB) // MIB for size in (100, 300, 100)] == [0, 100, -256]


def test_cublas_takes_its_own_once():
    addresses = Addresses()
    addresses.multiply()
    addresses.multiply()
    assert addresses.place(300 * MIB) == 64 * MIB
