"""Memory pressure from each machine's own sources; unknown without sources."""

import mmap
from dataclasses import replace

import pytest

from lightning_unified.hardware import PressureReader, Sources

MIB, GIB = 2**20, 2**30
V2 = "fs/cgroup/user.slice/job.scope"


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def stalled(microseconds):
    return (
        f"some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\n"
    )


def after_a_second(sources, path, before, after, *, root=None):
    """Read twice, one second apart, with `path` below procfs changed in between."""
    root, reader = root or sources.proc, PressureReader(sources)
    write(root, path, before)
    reader.read(10.0)
    write(root, path, after)
    return reader.read(11.0)


def test_every_machine_is_judged_without_touching_torch(any_machine):
    reader = PressureReader(replace(any_machine, torch=None))
    first, second = reader.read(1.0), reader.read(2.0)

    assert {first.level, second.level} <= {"normal", "unknown"}
    assert first.swap_out_bytes_per_s is None and first.stall_share is None


def test_this_machine_is_judged():
    reader = PressureReader(Sources.live())

    assert reader.read(1.0).level in {"normal", "warn", "critical", "unknown"}
    assert reader.read(2.0).available.source


def test_a_machine_without_sources_is_unknown_and_says_so(machine):
    pressure = PressureReader(machine("bare")).read(1.0)

    assert (pressure.level, pressure.available.bytes) == ("unknown", None)
    assert pressure.reasons == ("no source of memory pressure can be read here",)


@pytest.mark.parametrize(
    ("value", "level"),
    [(1, "normal"), (2, "warn"), (4, "critical"), (0, "unknown"), (3, "unknown"), (None, "unknown")],
)
def test_macos_says_its_level_and_another_value_is_unknown(machine, value, level):
    mac = machine("m2")
    values = {"kern.memorystatus_vm_pressure_level": value}
    sources = replace(mac, sysctl=lambda name: values.get(name, mac.sysctl(name)))

    assert PressureReader(sources).read(1.0).level == level


@pytest.mark.parametrize(("grown", "level"), [(32 * MIB, "warn"), (1 * MIB, "normal"), (-32 * MIB, "normal")])
def test_growth_of_swap_in_use_is_the_swap_out_of_a_mac(machine, grown, level):
    mac, used = machine("m4_pro"), [GIB, GIB + grown]
    usage = {
        "kern.memorystatus_vm_pressure_level": lambda: 1,
        "vm.swapusage": lambda: 4096 << 192 | used.pop(0) << 128 | 7,
    }
    reader = PressureReader(replace(mac, sysctl=lambda name: usage[name]() if name in usage else mac.sysctl(name)))
    first, second = reader.read(0.0), reader.read(1.0)

    assert (first.level, first.swap_out_bytes_per_s) == ("normal", None)
    assert (second.level, second.swap_out_bytes_per_s) == (level, max(0, grown))


@pytest.mark.parametrize(("share", "level"), [(0.05, "normal"), (0.15, "warn"), (0.4, "critical")])
def test_the_share_of_time_in_which_everything_waits_decides_on_linux(machine, share, level):
    pressure = after_a_second(
        machine("rtx4090"), "pressure/memory", stalled(5_000_000), stalled(5_000_000 + int(share * 1e6))
    )

    assert pressure.level == level
    assert pressure.stall_share == pytest.approx(share)
    assert bool(pressure.reasons) == (level != "normal")


def test_the_cgroups_own_stalls_count_where_the_host_has_none(machine):
    sources = machine("cgroup_v2")
    write(sources.proc, "pressure/memory", stalled(7))
    pressure = after_a_second(sources, f"{V2}/memory.pressure", stalled(0), stalled(500_000), root=sources.sys)

    assert (pressure.level, pressure.stall_share) == ("critical", pytest.approx(0.5))


@pytest.mark.parametrize(("pages", "level"), [(32 * MIB // mmap.PAGESIZE, "warn"), (10, "normal")])
def test_bytes_that_go_to_swap_are_a_warning(machine, pages, level):
    pressure = after_a_second(machine("t4"), "vmstat", "pswpin 1\npswpout 5\n", f"pswpin 1\npswpout {5 + pages}\n")

    assert (pressure.level, pressure.swap_out_bytes_per_s) == (level, pages * mmap.PAGESIZE)


def test_swapping_while_everything_waits_is_critical(machine):
    sources = machine("t4")
    write(sources.proc, "vmstat", "pswpout 0\n")
    write(sources.proc, "pressure/memory", stalled(0))
    reader = PressureReader(sources)
    reader.read(0.0)
    write(sources.proc, "vmstat", f"pswpout {64 * MIB // mmap.PAGESIZE}\n")
    write(sources.proc, "pressure/memory", stalled(150_000))

    assert reader.read(1.0).level == "critical"


@pytest.mark.parametrize(
    ("total", "available", "level"),
    [
        (16, 1.0, "normal"),
        (16, 0.7, "warn"),
        (16, 0.3, "critical"),
        (512, 5, "normal"),
        (512, 3, "warn"),
        (512, 0.9, "critical"),
    ],
)
def test_what_can_still_be_had_has_floors(machine, total, available, level):
    sources = machine("rtx4090")
    write(sources.proc, "meminfo", f"MemTotal: {total << 20} kB\nMemAvailable: {int(available * 2**20)} kB\n")
    pressure = PressureReader(sources).read(0.0)

    assert pressure.level == level
    assert pressure.available.bytes == int(available * 2**20) * 1024


@pytest.mark.parametrize(("free", "level"), [(100, "warn"), (300, "normal")])
def test_free_memory_counts_only_below_the_kernels_own_reserve(machine, free, level):
    sources = machine("gb10")
    write(sources.proc, "sys/vm/min_free_kbytes", f"{200 * 1024}\n")
    write(
        sources.proc, "meminfo", f"MemTotal: {120 << 20} kB\nMemAvailable: {60 << 20} kB\nMemFree: {free * 1024} kB\n"
    )

    assert PressureReader(sources).read(0.0).level == level


@pytest.mark.parametrize(("event", "level"), [("max", "normal"), ("oom", "critical"), ("low", "normal")])
def test_a_full_cgroup_is_no_pressure_and_one_that_runs_out_is(machine, event, level):
    sources = machine("cgroup_v2")
    pressure = after_a_second(sources, f"{V2}/memory.events", f"{event} 3\n", f"{event} 9\n", root=sources.sys)

    assert pressure.level == level


def test_a_cgroup_v1_that_hits_its_limit_with_little_left_is_critical(machine):
    sources = machine("cgroup_v1")
    write(sources.sys, "fs/cgroup/memory/docker/abc/memory.usage_in_bytes", str(int(6.8 * GIB)))
    pressure = after_a_second(sources, "fs/cgroup/memory/docker/abc/memory.failcnt", "3", "7", root=sources.sys)

    assert pressure.level == "critical"
    assert "the cgroup's limit was hit 4 times" in pressure.reasons


def test_a_clock_that_stands_still_gives_no_rate(machine):
    sources = machine("t4")
    write(sources.proc, "vmstat", "pswpout 5\n")
    reader = PressureReader(sources)
    reader.read(3.0)

    assert reader.read(3.0).swap_out_bytes_per_s is None


def on_one_pool(machine, *, available, free, blocks=None):
    """The level of a GB10 of 119.7 GiB.

    Arguments in GiB: available, free, and free in blocks of 2 MiB if blocks are listed.
    """
    sources = machine("gb10")
    figures = {"MemTotal": 119.7, "MemAvailable": available, "MemFree": free}
    write(sources.proc, "meminfo", "".join(f"{name}: {int(count * 2**20)} kB\n" for name, count in figures.items()))
    if blocks is not None:
        orders = [free * GIB // mmap.PAGESIZE, *[0] * 8, blocks * GIB // (mmap.PAGESIZE << 9), 0]
        counts = " ".join(str(int(count)) for count in orders)
        write(sources.proc, "buddyinfo", f"Node 0, zone      DMA 9 9\nNode 0, zone   Normal {counts}\n")
    return PressureReader(sources, one_pool=True).read(0.0)


@pytest.mark.parametrize(
    ("available", "free", "blocks", "level"),
    [
        (100, 0.5, 0.0, "normal"),
        (22, 0.5, None, "warn"),
        (22, 9.0, None, "normal"),
        (22, 9.0, 0.5, "warn"),
        (22, 9.0, 2.0, "normal"),
    ],
    ids=["only the page cache", "little free", "enough free", "free in crumbs", "free in blocks"],
)
def test_a_gpu_in_the_hosts_memory_needs_free_blocks_where_little_can_be_had(machine, available, free, blocks, level):
    assert on_one_pool(machine, available=available, free=free, blocks=blocks).level == level


@pytest.mark.parametrize(("available", "level"), [(7, "normal"), (5, "warn"), (2, "critical")])
def test_a_gpu_that_hangs_instead_of_raising_has_higher_floors(machine, available, level):
    sources = machine("gb10")
    pressure = on_one_pool(machine, available=available, free=4.0, blocks=2.0)

    assert pressure.level == level
    assert PressureReader(sources).read(0.0).level == ("normal" if available > 4 else "warn")
