"""A simulated Mac's allocator, in both versions that torch has had."""

import pytest

from lightning_unified.hardware import cap_allocator, resolve_budget
from lightning_unified.hardware.allocators.metal import MetalHeaps
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.hardware.simulated import SimulatedMachine

KIB, MIB, GIB = 2**10, 2**20, 2**30
TORCHES = ("2.13.0", "2.14.1")


def fill(allocator, size):
    for _ in range(1000):
        allocator.allocate(size)  # takes no memory of the real machine


def refused(allocator, size):
    """Allocate blocks of `size` until the allocator refuses; return what it raised."""
    with pytest.raises(RuntimeError, match=r"memory|buffer") as caught:
        fill(allocator, size)
    return caught.value


@pytest.mark.parametrize("version", TORCHES)
def test_a_buffer_longer_than_metal_allows_is_refused_by_its_size(version):
    error = refused(SimulatedMachine("m1-8gb", torch_version=version).allocator, 5 * GIB)

    assert (type(error), str(error)) == (RuntimeError, "Invalid buffer size: 5.00 GiB")
    assert is_out_of_memory(error)


@pytest.mark.parametrize("version", TORCHES)
def test_a_mac_without_a_cap_goes_beyond_its_ram_before_it_raises(version):
    machine = SimulatedMachine("m2-16gb", torch_version=version)
    error = refused(machine.allocator, 4 * GIB)

    assert "max allowed: 20.13 GiB" in str(error)
    assert machine.sources.sysctl("kern.memorystatus_vm_pressure_level") == 4


@pytest.mark.parametrize(("version", "without"), [("2.13.0", 5 * GIB), ("2.14.1", 2 * GIB)])
def test_above_the_low_watermark_metal_frees_its_cache_before_it_grows(version, without):
    reserved = {}
    for low in ("0.1", "0.0"):  # 1.18 GiB, and never
        environ = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.9", "PYTORCH_MPS_LOW_WATERMARK_RATIO": low}
        allocator = SimulatedMachine("m2-16gb", environ=environ, torch_version=version).allocator
        for count in (20, 30, 40, 50):
            for block in [allocator.allocate(count * MIB) for _ in range(30)]:
                allocator.free(block)
        reserved[low] = allocator.peak_reserved

    assert reserved["0.0"] == without
    assert reserved["0.1"] < 2.1 * GIB


@pytest.mark.parametrize("version", TORCHES)
def test_one_small_heap_can_use_up_a_cap_below_a_gibibyte(version):
    machine = SimulatedMachine("m2-16gb", torch_version=version)
    cap_allocator("mps", resolve_budget("512MiB", machine.reading()), sources=machine.sources)
    allocator = machine.allocator
    allocator.allocate(10 * MIB)

    with pytest.raises(RuntimeError, match=r"MPS allocated: 1024\.00 MiB, .* max allowed: 512\.00 MiB"):
        allocator.allocate(10 * MIB)


def test_metal_opens_a_heap_of_a_gibibyte_for_twenty_mebibytes():
    heaps = MetalHeaps()
    block = heaps.place(20 * MIB, pressed=False)
    heaps.give_back(block)
    heaps.release()

    assert heaps.growth(20 * MIB, pressed=False) == GIB
    assert heaps.growth(20 * MIB, pressed=True) == 20 * MIB
    assert (heaps.growth(KIB, pressed=False), heaps.growth(2 * MIB, pressed=False)) == (8 * MIB, 32 * MIB)
    assert heaps.growth(GIB + 1, pressed=False) == GIB + 2 * MIB
    assert heaps.reserved == 0


@pytest.mark.parametrize(("version", "counted"), [("2.13.0", 5 * MIB), ("2.14.1", 2 * MIB)])
def test_a_simulated_mac_splits_a_freed_block_since_torch_2_14(version, counted):
    allocator = SimulatedMachine("m2-16gb", torch_version=version).allocator
    allocator.free(allocator.allocate(5 * MIB))

    assert allocator.allocate(2 * MIB).size == counted
    assert (allocator.peak, allocator.peak_reserved) == (5 * MIB, 32 * MIB)
