"""Reader of the CPU's pool: RAM, within the cgroup limit if there is one."""

import functools
import mmap
from collections.abc import Mapping
from pathlib import Path

from lightning_unified.hardware.host.cgroups import memory_limit
from lightning_unified.hardware.reading import Figure, Reading
from lightning_unified.hardware.sources import Sources, meminfo, read_text
from lightning_unified.units import MIB

__all__ = [
    "cpu_name",
    "free_in_large_blocks",
    "host_available",
    "host_pool",
    "host_swap",
    "host_total",
    "mmap_threshold",
    "peak_resident",
    "read_cpu",
    "resident_files",
]

_PROC = Path("/proc")  # of this machine
_XSW_BITS, _XSW_USED = 64, 2  # struct xsw_usage, sys/sysctl.h: total, available, used, of 64 bits each

# Speculative pages are not added: XNU counts them among the file-backed (external) ones too.
_MAC_AVAILABLE_PAGES = ("vm.page_free_count", "vm.page_purgeable_count", "vm.page_pageable_external_count")


def read_cpu(sources: Sources, index: int | None = None) -> Reading:
    """Read RAM as a unified pool; `allocated` is this process's resident size.

    `index` is ignored. `/proc/meminfo` and `/proc/self/status` are read once: a run reads its pool at each step.
    """
    del index
    counters, process = meminfo(sources), _process(sources)
    total, available = host_pool(sources, counters)
    return Reading(
        device="cpu",
        backend="cpu",
        name=cpu_name(sources),
        pool="unified",
        total=total,
        available=available,
        allocated=_resident(process, "VmRSS"),
        reserved=Figure(None, "unknown: the CPU allocator reports no reserve of its own"),
        peak=peak_resident(sources, process),
        host=host_total(sources, counters),
    )


def host_pool(sources: Sources, counters: Mapping[str, int] | None = None) -> tuple[Figure, Figure]:
    """Return this process's RAM in total and available now, both within the cgroup limit.

    `counters` is `/proc/meminfo`, if it was read already.
    """
    counters = meminfo(sources) if counters is None else counters
    total, available = host_total(sources, counters), host_available(sources, counters)
    limit = memory_limit(sources)
    if limit is not None and (total.bytes is None or limit.total < total.bytes):
        total = Figure(limit.total, limit.source)
    if limit is not None and (available.bytes is None or limit.headroom < available.bytes):
        available = Figure(limit.headroom, f"headroom under the cgroup limit ({limit.source})")
    return total, available


def host_total(sources: Sources, counters: Mapping[str, int] | None = None) -> Figure:
    """Return the machine's RAM: `MemTotal` on Linux, `hw.memsize` on macOS.

    `counters` is `/proc/meminfo`, if it was read already.
    """
    linux = (meminfo(sources) if counters is None else counters).get("MemTotal")
    if linux is not None:
        return Figure(linux, "MemTotal")
    mac = sources.sysctl("hw.memsize")
    if isinstance(mac, int):
        return Figure(mac, "hw.memsize")
    return Figure(None, "unknown: neither MemTotal of /proc/meminfo nor sysctl hw.memsize")


def host_available(sources: Sources, counters: Mapping[str, int] | None = None) -> Figure:
    """Return the RAM available without swapping, before any cgroup limit.

    Linux reports it (`MemAvailable`). macOS does not: free, purgeable and file-backed pages are summed. The sum omits memory
    that the compressor could still free, so it is a low estimate. Swap never counts. `counters` is `/proc/meminfo`, if it was
    read already.

    Source:
        Page counters: xnu, `bsd/vm/vm_unix.c`.
    """
    linux = (meminfo(sources) if counters is None else counters).get("MemAvailable")
    if linux is not None:
        return Figure(linux, "MemAvailable")
    page, counts = sources.sysctl("hw.pagesize"), [sources.sysctl(name) for name in _MAC_AVAILABLE_PAGES]
    pages = [count for count in counts if isinstance(count, int)]
    if isinstance(page, int) and len(pages) == len(counts):
        return Figure(sum(pages) * page, "vm.page_{free,purgeable,pageable_external}_count")
    level, total = sources.sysctl("kern.memorystatus_level"), sources.sysctl("hw.memsize")
    if isinstance(level, int) and isinstance(total, int):
        return Figure(total * level // 100, "kern.memorystatus_level percent of hw.memsize")
    return Figure(None, "unknown: neither MemAvailable of /proc/meminfo nor the vm.page_* sysctls")


def host_swap(sources: Sources) -> tuple[Figure, Figure]:
    """Return total swap and swap in use. macOS adds swap as needed, so its total says little."""
    linux = meminfo(sources)
    if "SwapTotal" in linux and "SwapFree" in linux:
        total, free = linux["SwapTotal"], linux["SwapFree"]
        return Figure(total, "SwapTotal"), Figure(total - free, "SwapTotal - SwapFree")
    usage = sources.sysctl("vm.swapusage")
    if isinstance(usage, int):
        total, used = (usage >> _XSW_BITS * at & (1 << _XSW_BITS) - 1 for at in (0, _XSW_USED))
        return Figure(total, "vm.swapusage"), Figure(used, "vm.swapusage")
    unknown = Figure(None, "unknown: neither SwapTotal of /proc/meminfo nor sysctl vm.swapusage")
    return unknown, unknown


def free_in_large_blocks(sources: Sources) -> Figure:
    """Return the bytes free in blocks of 2 MiB or more.

    The result is all free bytes if the kernel lists no blocks.
    """
    found = None
    for line in (read_text(sources.proc / "buddyinfo") or "").splitlines():
        counts = [int(word) for word in line.partition("zone")[2].split()[1:] if word.isdigit()]
        sizes = [mmap.PAGESIZE << order for order in range(len(counts))]
        found = (found or 0) + sum(count * size for count, size in zip(counts, sizes, strict=True) if size >= 2 * MIB)
    if found is not None:
        return Figure(found, "buddyinfo")
    free = meminfo(sources).get("MemFree")
    return Figure(free, "unknown: neither /proc/buddyinfo nor MemFree" if free is None else "MemFree")


def mmap_threshold(sources: Sources) -> int | None:
    """Return the bytes from which the C library maps blocks singly, if the user set it.

    Otherwise return None.

    Source:
        The GNU C Library manual, "Memory Allocation Tunables": glibc.malloc.mmap_threshold, formerly MALLOC_MMAP_THRESHOLD_.
    """
    text = sources.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    for tunable in sources.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = tunable.partition("=")
        text = value if name == "glibc.malloc.mmap_threshold" else text
    return int(text) if sources.platform == "linux" and text.isdecimal() else None


def cpu_name(sources: Sources) -> str:
    """Return the name of the processor, else of the board, else the architecture."""
    if name := _own_model() if sources.proc == _PROC else _model(sources.proc):
        return name
    brand = sources.sysctl("machdep.cpu.brand_string")
    if isinstance(brand, str) and brand:
        return brand
    board = (read_text(sources.proc / "device-tree" / "model") or "").strip("\0 \n")
    return board or sources.machine


@functools.cache
def _own_model() -> str | None:
    """Return the name of this machine's processor; its kernel measures the clock of each core for one reading."""
    return _model(_PROC)


def _model(proc: Path) -> str | None:
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _process(sources: Sources) -> str:
    return read_text(sources.proc / "self" / "status") or ""


def _resident(process: str, field: str) -> Figure:
    for line in process.splitlines():
        if line.startswith(field):
            words = line.split()
            if len(words) == 3 and words[0] == f"{field}:" and words[1].isdigit():
                return Figure(int(words[1]) * 1024, field)
    return Figure(None, f"unknown: {field} needs /proc/self/status, which is missing")


def resident_files(sources: Sources) -> int:
    """Return the resident bytes of file pages, such as code; 0 if unknown.

    The system drops such pages when memory is short.
    """
    return _resident(_process(sources), "RssFile").bytes or 0


def peak_resident(sources: Sources, process: str | None = None) -> Figure:
    """Return the peak of this process's resident bytes.

    It is one small read, cheap enough for every step. `process` is `/proc/self/status`, if it was read already.
    """
    peak = _resident(_process(sources) if process is None else process, "VmHWM")
    if peak.bytes is None and (resident := sources.max_resident()) is not None:
        return Figure(resident, "ru_maxrss")
    return peak
