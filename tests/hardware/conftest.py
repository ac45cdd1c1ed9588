"""Machines that are not present, as injected sources; figures from field reports."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_unified.hardware import Sources

GIB = 2**30


def gib(count):
    return int(count * GIB)


class Recorder:
    """Records calls that change something.

    It also records the environment when Metal's allocator was constructed.
    """

    def __init__(self):
        self.calls, self.metal_saw, self.environ = [], None, {}
        self.cuda_is_up, self.stands = False, 1.0

    def metal(self, value):
        def ask():
            self.metal_saw = dict(self.environ) if self.metal_saw is None else self.metal_saw
            return value

        return ask

    def fraction(self, low, high):
        def call(value, device=None):
            assert isinstance(value, float), "torch refuses anything but a float"
            assert low <= value <= high, "torch refuses a ratio out of range"
            self.calls.append(("fraction", value, device))
            self.stands = value

        return call


def _refuse(message):
    def call(*args):
        raise RuntimeError(message)

    return call


def bare_torch(version="2.13.0", **parts):
    """A torch with no accelerator; `parts` replace what a machine has."""
    absent = SimpleNamespace(is_available=lambda: False)
    lists = SimpleNamespace(
        _get_fused_kernels_supported_devices=lambda: ["mps", "cuda", "xpu", "hpu", "cpu"],
        _get_foreach_kernels_supported_devices=lambda: ["cuda", "xpu"],
    )
    torch = SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=None, hip=None),
        cuda=absent,
        xpu=absent,
        backends=SimpleNamespace(mps=absent, cuda=SimpleNamespace(is_flash_attention_available=lambda: True)),
        utils=SimpleNamespace(_foreach_utils=lists),
        ones=lambda *a, **k: SimpleNamespace(add=lambda other: None),
        bfloat16="bfloat16",
        _C=SimpleNamespace(_accelerator_isAllocatorInitialized=lambda: False),
    )
    for name, part in parts.items():
        setattr(torch, name, part)
    return torch


def gpu_torch(
    recorder, *, name, total, free, capability=(9, 0), integrated=0, hip=None, arch="", allocated=0.0, reserved=0.0
):
    properties = SimpleNamespace(name=name, total_memory=gib(total), is_integrated=integrated, gcnArchName=arch)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda index: properties,
        get_device_capability=lambda index: capability,
        mem_get_info=lambda index: (gib(free), gib(total)),
        memory_allocated=lambda index: gib(allocated),
        memory_reserved=lambda index: gib(reserved),
        max_memory_allocated=lambda index: gib(allocated),
        is_initialized=lambda: recorder.cuda_is_up,
        set_per_process_memory_fraction=recorder.fraction(0, 1),
        get_per_process_memory_fraction=lambda index: recorder.stands,
        synchronize=_refuse("a reading must not wait for the device"),
    )
    torch = bare_torch(cuda=cuda)
    torch.version = SimpleNamespace(cuda=None if hip else "13.0", hip=hip)
    return torch


def mps_torch(recorder, *, name, recommended, driver=0.0, current=0.0, pool=0.0, version="2.13.0"):
    new = tuple(map(int, version.split(".")[:2])) >= (2, 13)
    gone = _refuse("INTERNAL ASSERT FAILED: Allocator for mps is not a DeviceAllocator")
    mps = SimpleNamespace(
        recommended_max_memory=recorder.metal(gib(recommended)),
        driver_allocated_memory=recorder.metal(gib(driver)),
        current_allocated_memory=recorder.metal(gib(current)),
        set_per_process_memory_fraction=recorder.fraction(0, 2),
        synchronize=_refuse("a reading must not wait for the device"),
        empty_cache=_refuse("a reading must not clear caches"),
    )
    accelerator = SimpleNamespace(
        max_memory_allocated=(lambda: gib(current)) if new else gone,
        memory_reserved=(lambda: gib(pool)) if new else gone,
        get_memory_info=_refuse("blind to other processes on MPS: never ask"),
    )
    torch = bare_torch(version, mps=mps, accelerator=accelerator)
    torch.backends.mps = SimpleNamespace(is_available=lambda: True, get_name=lambda: name)
    torch._C = SimpleNamespace(_accelerator_isAllocatorInitialized=lambda: recorder.metal_saw is not None)
    return torch


def xpu_torch(*, name, total, integrated, free=None):
    properties = SimpleNamespace(
        name=name, total_memory=gib(total), is_integrated_gpu=integrated, has_bfloat16_conversions=True
    )
    xpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda index: properties,
        mem_get_info=(lambda index: (gib(free), gib(total)))
        if free is not None
        else _refuse("doesn't support querying the available free memory"),
        memory_allocated=lambda index: 0,
        memory_reserved=lambda index: 0,
        max_memory_allocated=lambda index: 0,
    )
    return bare_torch(xpu=xpu)


def linux(
    folder: Path, torch, *, ram, available, free=None, files=None, cores=8, cpu="Test CPU", flags="sse2", **parts
):
    """Sources of a Linux host.

    `files` are further files of procfs and sysfs by their path below `folder`.
    """
    free = available if free is None else free
    kib = {"MemTotal": ram, "MemFree": free, "MemAvailable": available}
    content = {
        "proc/meminfo": "".join(f"{name}:  {int(count * 2**20)} kB\n" for name, count in kib.items()),
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: {cpu}\nflags\t\t: {flags}\n",
        "proc/self/status": "Name:\tpython\nVmHWM:\t 1048576 kB\nVmRSS:\t  524288 kB\n",
        **(files or {}),
    }
    for path, text in content.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Sources(torch=torch, proc=folder / "proc", sys=folder / "sys", affinity=lambda: cores, **parts)


def mac(recorder, torch, *, ram, available, brand, performance=4, wired=0, **parts):
    """Sources of a Mac: no procfs, pages of 16 KiB."""
    pages = gib(available) // 16384
    values = {
        "hw.memsize": gib(ram),
        "hw.pagesize": 16384,
        "vm.page_free_count": pages // 2,
        "vm.page_purgeable_count": pages // 4,
        "vm.page_pageable_external_count": pages - pages // 2 - pages // 4,
        "machdep.cpu.brand_string": brand,
        "hw.perflevel0.physicalcpu": performance,
        "hw.physicalcpu": performance + 4,
        "iogpu.wired_limit_mb": wired,
    }
    recorder.environ = {}
    return Sources(
        torch=torch,
        sysctl=values.get,
        platform="darwin",
        machine="arm64",
        environ=recorder.environ,
        max_resident=lambda: gib(0.5),
        **parts,
    )


APU = {
    "sys/class/drm/card1/device/mem_info_vram_total": str(GIB // 2),
    "sys/class/drm/card1/device/mem_info_gtt_total": str(gib(128)),
}
GB10 = {"proc/driver/nvidia/gpus/000f:01:00.0/information": "Model: \t\t NVIDIA GB10\nIRQ:   \t\t 500\n"}
TEGRA = {"proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0"}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(gib(6)),
    "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(gib(3)),
    "sys/fs/cgroup/memory/docker/abc/memory.stat": f"cache 1\ntotal_inactive_file {gib(1)}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
    "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
}
V2 = {
    "proc/self/cgroup": "0::/user.slice/job.scope\n",
    "sys/fs/cgroup/user.slice/memory.max": str(gib(10)),
    "sys/fs/cgroup/user.slice/memory.current": str(gib(9)),
    "sys/fs/cgroup/user.slice/memory.stat": f"inactive_file {gib(0.5)}\n",
    "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
    "sys/fs/cgroup/user.slice/job.scope/memory.high": str(gib(8)),
    "sys/fs/cgroup/user.slice/job.scope/memory.current": str(gib(1)),
    "sys/fs/cgroup/user.slice/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000\n",
}


def _rtx4090(folder, rec):
    torch = gpu_torch(
        rec, name="NVIDIA GeForce RTX 4090", total=24, free=22, capability=(8, 9), allocated=1, reserved=1.5
    )
    return linux(folder, torch, ram=64, available=50, cores=16, has_module=lambda name: name == "triton")


def _t4(folder, rec):
    return linux(folder, gpu_torch(rec, name="Tesla T4", total=14.6, free=14, capability=(7, 5)), ram=16, available=12)


def _gb10(folder, rec):
    torch = gpu_torch(
        rec, name="NVIDIA GB10", total=119.7, free=41.52, capability=(12, 1), integrated=1, allocated=2, reserved=5
    )
    return linux(folder, torch, ram=119.7, free=41.52, available=115.7, files=GB10, cores=20)


def _jetson(folder, rec):
    torch = gpu_torch(rec, name="Orin", total=61.3, free=30, capability=(8, 7), integrated=1)
    return linux(folder, torch, ram=61.4, available=50, files=TEGRA, cores=12)


def _gh200(folder, rec):
    torch = gpu_torch(rec, name="NVIDIA GH200 480GB", total=94.5, free=93, integrated=1)
    return linux(folder, torch, ram=480, available=450, cores=72)


def _strix_halo(folder, rec):
    torch = gpu_torch(rec, name="AMD Radeon 8060S", total=62.47, free=120, integrated=1, hip="7.13", arch="gfx1151")
    return linux(folder, torch, ram=124.9, available=115, files=APU, cores=16)


def _rx6750xt(folder, rec):
    torch = gpu_torch(rec, name="AMD Radeon RX 6750 XT", total=12, free=11, hip="7.2", arch="gfx1031")
    return linux(folder, torch, ram=32, available=25)


def _m1(folder, rec):
    return mac(rec, mps_torch(rec, name="Apple M1", recommended=5.33), ram=8, available=3.5, brand="Apple M1")


def _m2(folder, rec):
    torch = mps_torch(rec, name="Apple M2", recommended=11.84, version="2.11.0")
    return mac(rec, torch, ram=16, available=9, brand="Apple M2")


def _m4_pro(folder, rec):
    torch = mps_torch(rec, name="Apple M4 Pro", recommended=36, driver=4, current=2, pool=3)
    return mac(rec, torch, ram=48, available=35, brand="Apple M4 Pro", performance=10)


def _lunar_lake(folder, rec):
    return linux(folder, xpu_torch(name="Intel Arc 140V", total=28, integrated=True), ram=31.3, available=24)


def _mac_cpu(folder, rec):
    return mac(rec, bare_torch(), ram=16, available=6, brand="Intel(R) Core(TM) i7")


MACHINES = {
    "rtx4090": _rtx4090,
    "t4": _t4,
    "gb10": _gb10,
    "jetson": _jetson,
    "gh200": _gh200,
    "strix_halo": _strix_halo,
    "rx6750xt": _rx6750xt,
    "m1": _m1,
    "m2": _m2,
    "m4_pro": _m4_pro,
    "lunar_lake": _lunar_lake,
    "mac_cpu": _mac_cpu,
    "cgroup_v1": lambda folder, rec: linux(folder, bare_torch(), ram=32, available=30, files=V1),
    "cgroup_v2": lambda folder, rec: linux(
        folder, bare_torch(), ram=32, available=30, files=V2, flags="sse2 avx512_bf16"
    ),
    "bare": lambda folder, rec: Sources(torch=bare_torch()),
}


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def machine(tmp_path, recorder):
    """Build the sources of a named machine; keyword arguments replace fields of `Sources`."""

    def build(name, **changes):
        (tmp_path / name).mkdir(exist_ok=True)
        return replace(MACHINES[name](tmp_path / name, recorder), **changes)

    return build


@pytest.fixture(params=sorted(MACHINES))
def any_machine(request, machine):
    """Each machine in turn."""
    return machine(request.param)
