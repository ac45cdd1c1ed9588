"""Readings of each machine's pool."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_unified.errors import HardwareError
from lightning_unified.hardware import Figure, read
from lightning_unified.hardware.host.memory import mmap_threshold

GIB = 2**30


def gib(count):
    return int(count * GIB)


FIGURES = ("total", "available", "allocated", "reserved", "peak", "host")


def test_importing_hardware_leaves_torch_alone():
    code = "import sys, lightning_unified.hardware; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_machine_reads_with_a_source_for_every_figure(any_machine):
    reading = read(sources=any_machine)

    for name in FIGURES:
        figure = getattr(reading, name)
        assert figure.source
        assert (figure.bytes is None) == figure.source.startswith("unknown: "), (name, figure)


def test_an_unknown_figure_is_none_and_never_zero(machine):
    reading = read(sources=machine("bare"))

    assert [getattr(reading, name).bytes for name in FIGURES] == [None] * 6


def test_this_machine_reads_without_injection():
    reading = read("cpu")

    assert reading.total.bytes is not None
    assert reading.available.bytes is not None
    assert 0 < reading.available.bytes <= reading.total.bytes


def test_a_discrete_card_counts_its_own_cached_blocks_as_available(machine):
    reading = read(sources=machine("rtx4090"))

    assert (reading.backend, reading.pool, reading.device) == ("cuda", "dedicated", "cuda:0")
    assert reading.available.bytes == gib(22.5)
    assert reading.available.source == "torch.cuda.mem_get_info + own cached blocks"


def test_gb10_takes_availability_from_the_host_not_from_the_driver(machine):
    """The driver's free memory is MemFree, which excludes the page cache.

    41.52 of 115.7 GiB are available.
    """
    reading = read(sources=machine("gb10"))

    assert reading.pool == "unified"
    assert reading.available.bytes == pytest.approx(gib(115.7 + 3), rel=1e-6)
    assert reading.available.source == "MemAvailable + own cached blocks"


def test_gb10_without_procfs_is_not_called_one_pool(machine, tmp_path):
    reading = read(sources=machine("gb10", proc=tmp_path / "none"))

    assert reading.pool == "dedicated"
    assert reading.available.source.startswith("torch.cuda.mem_get_info")


def test_an_integrated_device_with_memory_of_its_own_is_dedicated(machine):
    """GH200 may call itself integrated; its HBM is not the host's RAM."""
    reading = read(sources=machine("gh200"))

    assert (reading.pool, reading.available.bytes) == ("dedicated", gib(93))


def test_an_apu_reaches_as_far_as_ram_where_hip_names_half(machine):
    reading = read(sources=machine("strix_halo"))

    assert (reading.backend, reading.pool) == ("rocm", "unified")
    assert reading.total.bytes == pytest.approx(gib(124.9), rel=1e-6)


def test_an_apu_offers_no_more_than_the_host_has(machine):
    reading = read(sources=machine("strix_halo"))

    assert reading.available.bytes == pytest.approx(gib(115), rel=1e-6)
    assert reading.available.source.startswith("MemAvailable")


def test_an_apu_offers_no_more_than_hip_has_free(machine):
    sources = machine("strix_halo")
    sources.torch.cuda.mem_get_info = lambda index: (gib(90), gib(62.47))
    reading = read(sources=sources)

    assert reading.available.bytes == gib(90)
    assert reading.available.source.startswith("torch.cuda.mem_get_info")


def test_an_apu_without_sysfs_believes_the_larger_of_hips_own_figures(machine, tmp_path):
    reading = read(sources=machine("strix_halo", sys=tmp_path / "none"))

    assert (reading.total.bytes, reading.total.source) == (gib(120), "torch.cuda.mem_get_info")


def test_a_discrete_amd_card_reads_as_a_dedicated_rocm_pool(machine):
    reading = read(sources=machine("rx6750xt"))

    assert (reading.backend, reading.pool, reading.total.bytes) == ("rocm", "dedicated", gib(12))


def test_metal_is_bounded_by_what_the_host_has_free(machine):
    reading = read(sources=machine("m1"))

    assert reading.total.bytes == gib(5.33)
    assert reading.available.bytes == pytest.approx(gib(3.5), abs=16384)
    assert reading.host.bytes == gib(8)


def test_metal_is_bounded_by_its_working_set_and_own_cache_is_added(machine):
    """36 recommended, 4 held by the driver, 3 of it in pools of which 2 are live: 32 + 1."""
    reading = read(sources=machine("m4_pro"))

    assert reading.available.bytes == gib(33)
    assert reading.reserved.bytes == gib(4)
    assert reading.peak == Figure(gib(2), "torch.accelerator.max_memory_allocated")


def test_metal_before_torch_2_13_has_no_peak_and_says_since_when(machine):
    peak = read(sources=machine("m2")).peak

    assert peak.bytes is None
    assert "from torch 2.13 on" in peak.source


def test_reading_metal_writes_a_safe_pair_before_the_allocator_exists(machine, recorder):
    read(sources=machine("m2"))

    high = float(recorder.metal_saw["PYTORCH_MPS_HIGH_WATERMARK_RATIO"])
    assert 0 < float(recorder.metal_saw["PYTORCH_MPS_LOW_WATERMARK_RATIO"]) < high <= 0.95


def test_reading_metal_twice_leaves_the_pair_as_the_allocator_saw_it(machine, recorder):
    sources = machine("m2")
    read(sources=sources)
    read(sources=sources)

    assert dict(recorder.environ) == recorder.metal_saw


def test_reading_metal_degrades_where_the_user_set_nonsense(machine, recorder):
    sources = machine("m2")
    recorder.environ["PYTORCH_MPS_HIGH_WATERMARK_RATIO"] = "much"

    assert read(sources=sources).total.bytes == gib(11.84)


def test_an_intel_igpu_that_cannot_say_falls_back_to_the_host(machine):
    reading = read("xpu", sources=machine("lunar_lake"))

    assert (reading.pool, reading.available.bytes) == ("unified", gib(24))
    assert reading.available.source == "MemAvailable (torch.xpu.mem_get_info cannot say)"


def test_a_discrete_intel_card_that_cannot_say_stays_unknown(machine):
    sources = machine("lunar_lake")
    properties = SimpleNamespace(name="Intel Arc B580", total_memory=gib(12), is_integrated_gpu=False)
    sources.torch.xpu.get_device_properties = lambda index: properties
    available = read("xpu", sources=sources).available

    assert available.bytes is None
    assert "doesn't support querying" in available.source


def test_auto_takes_the_cpu_where_only_an_intel_gpu_is(machine):
    assert read(sources=machine("lunar_lake")).backend == "cpu"


def test_a_v1_cgroup_limits_the_pool_and_its_page_cache_is_free(machine):
    reading = read(sources=machine("cgroup_v1"))

    assert (reading.total.bytes, reading.available.bytes) == (gib(6), gib(4))
    assert reading.total.source == "memory.limit_in_bytes of cgroup /docker/abc"


def test_the_number_v1_writes_for_no_limit_is_no_limit(machine, tmp_path):
    sources = machine("bare", proc=tmp_path / "proc", sys=tmp_path / "sys")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n")
    (tmp_path / "sys/fs/cgroup/memory/job").mkdir(parents=True)
    limit = tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes"

    limit.write_text("9223372036854771712\n")
    assert read(sources=sources).total.bytes is None
    limit.write_text(f"{gib(3)}\n")
    assert read(sources=sources).total.bytes == gib(3)


def test_nested_v2_cgroups_give_the_lowest_limit_and_the_tightest_headroom(machine):
    """memory.high of the job is lowest (8), but its parent's siblings leave only 10 - 9 + 0.5."""
    reading = read(sources=machine("cgroup_v2"))

    assert (reading.total.bytes, reading.total.source) == (gib(8), "memory.high of cgroup /user.slice/job.scope")
    assert reading.available.bytes == gib(1.5)


def test_a_container_whose_path_the_mount_does_not_show_is_read_at_the_mount(machine, tmp_path):
    sources = machine("bare", proc=tmp_path / "proc", sys=tmp_path / "sys")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod1/abc\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{gib(5)}\n")

    assert read(sources=sources).total == Figure(gib(5), "memory.max of cgroup /")


def test_the_cpu_counts_the_process_and_its_highest_point(machine):
    reading = read("cpu", sources=machine("cgroup_v1"))

    assert reading.allocated == Figure(gib(0.5), "VmRSS")
    assert reading.peak == Figure(gib(1), "VmHWM")
    assert reading.reserved.bytes is None


def test_a_mac_without_metal_reads_ram_from_sysctls(machine):
    reading = read(sources=machine("mac_cpu"))

    assert reading.available.bytes == pytest.approx(gib(6), abs=16384)
    assert reading.peak == Figure(gib(0.5), "ru_maxrss")
    assert reading.allocated.bytes is None


def test_a_mac_that_hides_its_page_counters_falls_back_to_the_free_level(machine):
    values = {"hw.memsize": gib(16), "kern.memorystatus_level": 40}

    assert read("cpu", sources=machine("mac_cpu", sysctl=values.get)).available.bytes == gib(16) * 40 // 100


def test_a_driver_that_fails_leaves_a_reason_instead_of_a_figure(machine):
    sources = machine("rtx4090")

    def fail(index):
        raise RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED")

    sources.torch.cuda.mem_get_info = fail

    available = read(sources=sources).available
    assert available.bytes is None
    assert "NVML_SUCCESS" in available.source


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu", "cuda:0"])
def test_a_device_that_is_not_here_is_refused_with_what_is(machine, device):
    with pytest.raises(HardwareError, match=f"device '{device}' is not present; this machine has cpu"):
        read(device, sources=machine("cgroup_v1"))


def test_an_index_beyond_the_devices_is_refused_with_the_range(machine):
    assert read("cuda:0", sources=machine("rtx4090")).device == "cuda:0"
    with pytest.raises(HardwareError, match="'cuda:3' is not present; the indices are 0 to 0"):
        read("cuda:3", sources=machine("rtx4090"))


@pytest.mark.parametrize("device", ["tpu", "cuda:x"])
def test_a_device_without_a_reader_is_refused_with_the_choices(machine, device):
    with pytest.raises(HardwareError, match="has no reader; use auto, cpu, cuda"):
        read(device, sources=machine("rtx4090"))


def test_a_torch_device_is_as_good_as_its_text(machine):
    import torch

    sources = machine("cgroup_v1")
    assert read(torch.device("cpu"), sources=sources) == read("cpu", sources=sources)


def test_sources_made_by_hand_know_nothing_of_this_machine(machine):
    bare = machine("bare")
    arguments = {
        "sysctl": ["hw.memsize"],
        "which": ["ls"],
        "has_module": ["sys"],
        "process_start": [1],
        "run": [["ls", "/"], 9.0],
    }
    callables = [f.name for f in fields(bare) if callable(getattr(bare, f.name))]

    assert not any(getattr(bare, name)(*arguments.get(name, [])) for name in callables)
    assert not bare.proc.exists()
    assert replace(bare, machine="arm64").machine == "arm64"


@pytest.mark.parametrize(
    ("written", "threshold"),
    [
        ({}, None),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, 65536),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=131072"}, 131072),
        ({"MALLOC_MMAP_THRESHOLD_": "much"}, None),
    ],
)
def test_from_which_size_on_the_c_library_maps_blocks_is_read_from_its_variables(machine, written, threshold):
    assert mmap_threshold(replace(machine("bare"), platform="linux", environ=written)) == threshold


def test_a_reading_of_the_cpu_opens_the_files_of_all_figures_once(machine, monkeypatch):
    opened, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **how: opened.append(self) or read_text(self, **how))
    sources = machine("t4")
    read("cpu", sources=sources)
    files = [sources.proc / "meminfo", sources.proc / "self" / "status"]

    assert [opened.count(path) for path in files] == [1, 1]
