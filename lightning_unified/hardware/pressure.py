"""The operating system's own verdict on memory: not how much is used, but whether the machine is running out of ways to cope."""

import mmap
from dataclasses import dataclass, field
from typing import Literal

from lightning_unified.hardware.readers.cgroups import full_stall, limit_events, stall_microseconds
from lightning_unified.hardware.readers.cpu import host_pool, host_swap
from lightning_unified.hardware.reading import Figure
from lightning_unified.hardware.sources import Sources, meminfo, read_text
from lightning_unified.units import GIB, KIB, MIB, format_bytes

__all__ = ["Level", "Pressure", "PressureReader"]

Level = Literal["normal", "warn", "critical", "unknown"]

# XNU, bsd/kern/kern_memorystatus_notify.c: the flags of dispatch sources. What is not listed is unknown, never normal.
_MAC_LEVELS: dict[object, Level] = {1: "normal", 2: "warn", 4: "critical"}

# Judgement, all of them. Stalls are PSI's "full" share (Documentation/accounting/psi.rst in Linux): above a tenth the machine mostly
# pages. Swap-out of 16 MiB/s is more than the tidying away of idle pages. Floors are shares of the pool with a ceiling, so that
# a machine of 128 GiB does not complain while it has left what a small one has in all.
_STALL_WARN, _STALL_CRITICAL = 0.10, 0.30
_SWAP_OUT_WARN = 16 * MIB
_FLOOR_WARN, _FLOOR_CRITICAL = (0.05, 4 * GIB), (0.02, 1 * GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """What the machine says about its memory now.

    Attributes:
        level: `"unknown"` where no source could be judged; it is neither good nor bad news.
        available: Bytes that could be had now, within the cgroup limit where there is one.
        swap_out_bytes_per_s: Bytes written to swap a second since the sample before; on macOS the growth of swap in use, which is
            less. None while unknown.
        stall_share: Share of the time since the sample before in which nothing ran for want of memory (PSI "full"). None while unknown.
        reasons: Why the level is above normal, or unknown, for people.
    """

    level: Level
    available: Figure
    swap_out_bytes_per_s: float | None
    stall_share: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counters:
    at: float
    swapped_out: int | None
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
    """Samples the system's counters and judges the change since its previous sample.

    Needs no privileges, waits for nothing and touches no accelerator, so that a thread may ask it beside a running step. A source
    that is missing contributes nothing; where none is left the level is `"unknown"`.

    Args:
        sources: Where to read from.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._before: _Counters | None = None

    def read(self, now: float) -> Pressure:
        """Return the pressure at `now`, seconds of any clock that only goes forward; the first sample has no rates."""
        after, before = self._sample(now), self._before
        self._before = after
        swap = _rate(before, after, before and before.swapped_out, after.swapped_out)
        stall = _stall(before, after)
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
            self._judge_floors(findings, total=total, available=available, events=events)
        if swap is not None and swap >= _SWAP_OUT_WARN:
            thrashes = stall is not None and stall >= _STALL_WARN
            (findings.critical if thrashes else findings.warn).append(f"{format_bytes(int(swap))} a second go to swap")
        reasons = (*findings.critical, *findings.warn)
        return Pressure(
            level=findings.level,
            available=available,
            swap_out_bytes_per_s=swap,
            stall_share=stall,
            reasons=reasons or (() if findings.known else ("no source of memory pressure can be read here",)),
        )

    def _sample(self, now: float) -> _Counters:
        sources = self._sources
        stalled = {"cgroup": stall_microseconds(sources)}
        stalled["host"] = full_stall(read_text(sources.proc / "pressure" / "memory"))
        return _Counters(
            at=now,
            swapped_out=self._swapped_out(),
            stalled={name: count for name, count in stalled.items() if count is not None},
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

    def _judge_floors(self, findings: _Findings, *, total: Figure, available: Figure, events: dict[str, int]) -> None:
        """Judge what is left. A full cgroup alone is no pressure, its page cache fills it; one that must kill to go on is."""
        low = False
        if available.bytes is not None and total.bytes is not None:
            warn, critical = (min(int(share * total.bytes), most) for share, most in (_FLOOR_WARN, _FLOOR_CRITICAL))
            low = available.bytes < warn
            text = (
                f"only {format_bytes(available.bytes)} of {format_bytes(total.bytes)} can be had ({available.source})"
            )
            findings.share(-available.bytes, warn=-warn + 1, critical=-critical + 1, text=text)
        if events.get("oom", 0) > 0:
            findings.critical.append("the cgroup ran out of memory")
        if low and events.get("max", 0) > 0:
            findings.critical.append(f"the cgroup's limit was hit {events['max']} times")
        free, least = meminfo(self._sources).get("MemFree"), self._least_free()
        if free is not None and least is not None and free < least:
            findings.warn.append(
                f"MemFree is {format_bytes(free)}, below the kernel's own reserve ({format_bytes(least)})"
            )

    def _least_free(self) -> int | None:
        """Return the free bytes below which every allocation must reclaim first; free memory alone says nothing above it."""
        text = (read_text(self._sources.proc / "sys" / "vm" / "min_free_kbytes") or "").strip()
        return int(text) * KIB if text.isdigit() else None


def _rate(before: _Counters | None, after: _Counters, then: int | None, count: int | None) -> float | None:
    if before is None or then is None or count is None or after.at <= before.at:
        return None
    return max(0, count - then) / (after.at - before.at)


def _stall(before: _Counters | None, after: _Counters) -> float | None:
    if before is None:
        return None
    rates = [_rate(before, after, before.stalled.get(name), count) for name, count in after.stalled.items()]
    shares = [min(1.0, rate / 1e6) for rate in rates if rate is not None]
    return max(shares, default=None)


def _rises(before: _Counters | None, after: _Counters) -> dict[str, int]:
    if before is None:
        return {}
    return {
        name: count - before.limit_events[name]
        for name, count in after.limit_events.items()
        if name in before.limit_events
    }
