"""macOS's page counters: parsed from the kernel's layout, and judged. Not run on a Mac."""

import ctypes
from dataclasses import replace

import pytest

from lightning_unified.hardware import PressureReader, Sources
from lightning_unified.hardware.host.mach import read_page_counters

MIB = 2**20
PAGE = 16384


class VmStatistics64(ctypes.Structure):
    """The fields of xnu's osfmk/mach/vm_statistics.h in order.

    C's own rules then place them.
    """

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wire")),
        *((name, ctypes.c_uint64) for name in ("zero_fill", "reactivations", "pageins", "pageouts", "faults")),
        *((name, ctypes.c_uint64) for name in ("cow_faults", "lookups", "hits", "purges")),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        *((name, ctypes.c_uint64) for name in ("decompressions", "compressions", "swapins", "swapouts")),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "external", "internal")),
        ("uncompressed_in_compressor", ctypes.c_uint64),
    ]


def packed(**fields):
    """The struct with every field of a value of its own, so that a wrong place shows."""
    filled = {name: 1000 + place for place, (name, _) in enumerate(VmStatistics64._fields_)}
    return bytes(VmStatistics64(**{**filled, **fields}))


def with_counters(mac, *samples):
    """A Mac at level normal, whose counters are the next of `samples` at each reading."""
    left = list(samples)
    calm = {"kern.memorystatus_vm_pressure_level": 1}
    return replace(mac, vm_info=lambda: left.pop(0), sysctl=lambda name: calm.get(name, mac.sysctl(name)))


def test_the_struct_is_as_large_as_the_count_that_is_asked_for():
    assert ctypes.sizeof(VmStatistics64) == 38 * 4


def test_the_counters_are_taken_from_their_places(machine):
    counters = read_page_counters(with_counters(machine("m2"), packed(swapouts=7, decompressions=11)))

    assert (counters.swapped_out, counters.decompressed) == (7 * PAGE, 11 * PAGE)


def test_what_a_later_kernel_appends_is_left_alone(machine):
    counters = read_page_counters(with_counters(machine("m2"), packed(swapouts=7) + b"\xff" * 96))

    assert counters.swapped_out == 7 * PAGE


@pytest.mark.parametrize("raw", [None, b"", b"\0" * 60])
def test_a_machine_that_gives_less_has_no_counters(machine, raw):
    assert read_page_counters(with_counters(machine("m2"), raw)) is None


def test_this_machine_has_counters_only_if_it_is_a_mac():
    live = Sources.live()

    assert (read_page_counters(live) is not None) == (live.platform == "darwin")


@pytest.mark.parametrize(
    ("out", "back", "level"),
    [(1, 1, "normal"), (32, 1, "warn"), (1, 300, "warn"), (32, 300, "critical")],
    ids=["little", "swap-out", "decompression", "both"],
)
def test_what_goes_out_and_what_comes_back_each_warn_and_both_are_critical(machine, out, back, level):
    """MiB in the one second between the two samples."""
    after = packed(swapouts=1018 + out * MIB // PAGE, decompressions=1015 + back * MIB // PAGE)
    reader = PressureReader(with_counters(machine("m4_pro"), packed(), after))
    first, second = reader.read(0.0), reader.read(1.0)

    assert (first.level, first.swap_out_bytes_per_s, first.decompressed_bytes_per_s) == ("normal", None, None)
    assert second.level == level
    assert (second.swap_out_bytes_per_s, second.decompressed_bytes_per_s) == (out * MIB, back * MIB)


def test_swap_that_grows_counts_where_it_grows_faster_than_the_counter_says(machine):
    used = [0, 64 * MIB]
    mac = with_counters(machine("m2"), packed(), packed())
    inner = mac.sysctl
    mac = replace(mac, sysctl=lambda name: used.pop(0) << 128 if name == "vm.swapusage" else inner(name))
    reader = PressureReader(mac)
    reader.read(0.0)

    assert reader.read(1.0).swap_out_bytes_per_s == 64 * MIB


def test_linux_has_no_compressor_to_read(machine):
    reader = PressureReader(machine("t4"))
    reader.read(0.0)

    assert reader.read(1.0).decompressed_bytes_per_s is None
