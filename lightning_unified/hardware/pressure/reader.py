"""Read memory pressure: how hard the operating system works to provide memory.

A full pool is no problem by itself. Pressure shows in stalls (PSI on Linux), swap and compressor traffic, low reserves, and
macOS's own level. Each sample compares the counters with the previous sample.
"""

import mmap
from dataclasses import dataclass, field
from typing import Literal

from lightning_unified.hardware.host.cgroups import full_stall, limit_events, stall_microseconds
from lightning_unified.hardware.host.mach import read_page_counters
from lightning_unified.hardware.host.memory import free_in_large_blocks, host_pool, host_swap
from lightning_unified.hardware.reading import Figure
from lightning_unified.hardware.sources import Sources, meminfo, read_text
from lightning_unified.units import GIB, KIB, MIB, format_bytes

__all__ = ["Level", "Pressure", "PressureReader"]

Level = Literal["normal", "warn", "critical", "unknown"]

# XNU, bsd/kern/kern_memorystatus_notify.c: flags of dispatch sources. Any other value is unknown, never normal.
_MAC_LEVELS: dict[object, Level] = {1: "normal", 2: "warn", 4: "critical"}

# All thresholds are judgement. Stalls are PSI's "full" share (Documentation/accounting/psi.rst in Linux): above a tenth the machine
# mostly pages. Swap-out of 16 MiB/s exceeds the routine eviction of idle pages. Decompression is cheaper than swap-in, so its threshold
# is higher; both at once mean that the same pages move out and in. Reserves are shares of the pool with a ceiling, so that a machine
# of 128 GiB does not warn while it has as much left as a small one has in total.
_STALL_WARN, _STALL_CRITICAL = 0.10, 0.30
_SWAP_OUT_WARN = 16 * MIB
_DECOMPRESSION_WARN = 256 * MIB
_RESERVE_WARN, _RESERVE_CRITICAL = (0.05, 4 * GIB), (0.02, 1 * GIB)

# A GPU that uses the host's pages (GB10) hangs where a card raises, so its ceilings are higher. Its driver has failed for lack of free
# 2 MiB blocks with 22 of 120 GiB available (vllm issue 56824). Free memory alone is no sign, because it falls with any file read.
_ONE_POOL_RESERVE_WARN, _ONE_POOL_RESERVE_CRITICAL = (0.05, 8 * GIB), (0.02, 4 * GIB)
_ONE_POOL_AVAILABLE, _ONE_POOL_BLOCKS = 0.25, 1 * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Memory pressure of the machine now.

    Attributes:
        level: `"normal"`, `"warn"`, `"critical"`, or `"unknown"` if no source could be judged.
        available: Bytes available now, within the cgroup limit if there is one.
        swap_out_bytes_per_s: Bytes a second written to swap since the previous sample. On a Mac without page counters, the
            growth of swap in use, which is less. None if unknown.
        stall_share: Share of the time since the previous sample in which all tasks waited for memory (PSI "full"). None if
            unknown.
        reasons: Why the level is above normal, or unknown, for people.
        decompressed_bytes_per_s: macOS: bytes a second read back from the compressor. None elsewhere.
    """

    level: Level
    available: Figure
    swap_out_bytes_per_s: float | None
    stall_share: float | None
    reasons: tuple[str, ...]
    decompressed_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counters:
    at: float
    swapped_out: dict[str, int]
    decompressed: dict[str, int]
    stalled: dict[str, int]
    limit_events: dict[str, int]


@dataclass(kw_only=True, slots=True)
class _Findings:
    known: bool = False
    warn: list[str] = field(default_factory=list)
    critical: list[str] = field(default_factory=list)

    def share(self, value: float | None, *, warn: float, critical: float, text: str) -> None:
        if value is not None:
            self.known = True
            if value >= warn:
                (self.critical if value >= critical else self.warn).append(text)

    @property
    def level(self) -> Level:
        return "critical" if self.critical else "warn" if self.warn else "normal" if self.known else "unknown"


class PressureReader:
    """Samples the system's counters and judges the change since the previous sample.

    It needs no privileges, waits for nothing and touches no accelerator, so a thread may call it beside a running step. A
    missing source contributes nothing; without any source the level is `"unknown"`.

    Args:
        sources: Sources of the counters.
        one_pool: Whether the run's CUDA or ROCm device uses the host's memory; then free blocks count too.
    """

    def __init__(self, sources: Sources, *, one_pool: bool = False) -> None:
        self._sources = sources
        self._one_pool = one_pool
        self._before: _Counters | None = None

    def read(self, now: float) -> Pressure:
        """Return the pressure at `now`, in seconds of a monotonic clock.

        The first sample has no rates.
        """
        after, before = self._sample(now), self._before
        self._before = after
        swap = _rate(before, after, "swapped_out")
        decompressed = _rate(before, after, "decompressed")
        waited = _rate(before, after, "stalled")
        stall = None if waited is None else min(1.0, waited / 1e6)
        events = _rises(before, after)
        total, available = host_pool(self._sources)
        findings = _Findings()
        if self._sources.platform == "darwin":
            self._judge_mac(findings)
        else:
            findings.share(
                stall,
                warn=_STALL_WARN,
                critical=_STALL_CRITICAL,
                text=f"{stall or 0:.0%} of the time everything waited for memory",
            )
            self._judge_reserves(findings, total=total, available=available, events=events)
        _judge_traffic(findings, swap=swap, decompressed=decompressed, stall=stall)
        reasons = (*findings.critical, *findings.warn)
        return Pressure(
            level=findings.level,
            available=available,
            swap_out_bytes_per_s=swap,
            stall_share=stall,
            reasons=reasons or (() if findings.known else ("no source of memory pressure can be read here",)),
            decompressed_bytes_per_s=decompressed,
        )

    def _sample(self, now: float) -> _Counters:
        sources = self._sources
        pages = read_page_counters(sources) if sources.platform == "darwin" else None
        stalls = {
            "cgroup": stall_microseconds(sources),
            "host": full_stall(read_text(sources.proc / "pressure" / "memory")),
        }
        swaps = {"swapouts": pages and pages.swapped_out, "vm.swapusage or pswpout": self._swapped_out()}
        return _Counters(
            at=now,
            swapped_out=_known(swaps),
            decompressed=_known({"decompressions": pages and pages.decompressed}),
            stalled=_known(stalls),
            limit_events=limit_events(sources),
        )

    def _swapped_out(self) -> int | None:
        if self._sources.platform == "darwin":
            return host_swap(self._sources)[1].bytes
        for line in (read_text(self._sources.proc / "vmstat") or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "pswpout" and count.strip().isdigit():
                return int(count) * mmap.PAGESIZE
        return None

    def _judge_mac(self, findings: _Findings) -> None:
        level = _MAC_LEVELS.get(self._sources.sysctl("kern.memorystatus_vm_pressure_level"), "unknown")
        findings.known = level != "unknown"
        if level in ("warn", "critical"):
            text = f"kern.memorystatus_vm_pressure_level says {level}"
            (findings.critical if level == "critical" else findings.warn).append(text)

    def _judge_reserves(self, findings: _Findings, *, total: Figure, available: Figure, events: dict[str, int]) -> None:
        """Judge the bytes that are left.

        A full cgroup alone is no pressure, because its page cache fills it. A cgroup that must kill to continue is.
        """
        low = False
        reserves = (
            (_ONE_POOL_RESERVE_WARN, _ONE_POOL_RESERVE_CRITICAL)
            if self._one_pool
            else (_RESERVE_WARN, _RESERVE_CRITICAL)
        )
        if available.bytes is not None and total.bytes is not None:
            warn, critical = (min(int(share * total.bytes), most) for share, most in reserves)
            low = available.bytes < warn
            text = (
                f"only {format_bytes(available.bytes)} of {format_bytes(total.bytes)} is available ({available.source})"
            )
            findings.share(-available.bytes, warn=-warn + 1, critical=-critical + 1, text=text)
            if self._one_pool and available.bytes < _ONE_POOL_AVAILABLE * total.bytes:
                self._judge_blocks(findings)
        if events.get("oom", 0) > 0:
            findings.critical.append("the cgroup ran out of memory")
        if low and events.get("max", 0) > 0:
            findings.critical.append(f"the cgroup's limit was hit {events['max']} times")
        free, least = meminfo(self._sources).get("MemFree"), self._least_free()
        if free is not None and least is not None and free < least:
            findings.warn.append(
                f"MemFree is {format_bytes(free)}, below the kernel's own reserve ({format_bytes(least)})"
            )

    def _judge_blocks(self, findings: _Findings) -> None:
        blocks = free_in_large_blocks(self._sources)
        if blocks.bytes is not None and blocks.bytes < _ONE_POOL_BLOCKS:
            findings.warn.append(
                f"only {format_bytes(blocks.bytes)} are free in blocks of 2 MiB ({blocks.source}), which the GPU's driver needs"
            )

    def _least_free(self) -> int | None:
        """Return the free bytes below which every allocation must reclaim first.

        Free memory above that says nothing about pressure.
        """
        text = (read_text(self._sources.proc / "sys" / "vm" / "min_free_kbytes") or "").strip()
        return int(text) * KIB if text.isdigit() else None


def _judge_traffic(findings: _Findings, *, swap: float | None, decompressed: float | None, stall: float | None) -> None:
    """Judge memory traffic: each direction is a warning; both, or one with stalls, is thrashing."""
    out = swap is not None and swap >= _SWAP_OUT_WARN
    back = decompressed is not None and decompressed >= _DECOMPRESSION_WARN
    thrashes = out and (back or (stall is not None and stall >= _STALL_WARN))
    found = findings.critical if thrashes else findings.warn
    if out:
        found.append(f"{format_bytes(int(swap or 0))} a second go to swap")
    if back:
        found.append(f"{format_bytes(int(decompressed or 0))} a second are read back from the compressor")


def _known(counts: dict[str, int | None]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count is not None}


def _rate(
    before: _Counters | None, after: _Counters, field: Literal["swapped_out", "decompressed", "stalled"]
) -> float | None:
    """Return the growth a second of the fastest counter of `field`; None if unknown."""
    if before is None or after.at <= before.at:
        return None
    then, now = getattr(before, field), getattr(after, field)
    grown = [max(0, count - then[name]) for name, count in now.items() if name in then]
    return max(grown) / (after.at - before.at) if grown else None


def _rises(before: _Counters | None, after: _Counters) -> dict[str, int]:
    if before is None:
        return {}
    return {
        name: count - before.limit_events[name]
        for name, count in after.limit_events.items()
        if name in before.limit_events
    }
