"""Read the limits of control groups (v1 and v2) on this process: memory and processor time."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_unified.hardware.sources import Sources, read_text

__all__ = ["MemoryLimit", "cpu_quota", "full_stall", "limit_events", "memory_limit", "stall_microseconds"]

_V1_UNLIMITED = 2**60  # v1 writes the largest page-aligned int64 for "no limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The tightest memory limit over this process's cgroup and its ancestors.

    Attributes:
        total: The lowest limit, in bytes.
        headroom: Least growth that any limited ancestor allows, in bytes; reclaimable file pages count as free.
        source: File of the lowest limit, below the cgroup mount.
    """

    total: int
    headroom: int
    source: str


def memory_limit(sources: Sources) -> MemoryLimit | None:
    """Return the memory limit on this process, None if there is none.

    A limit binds every descendant, so the walk goes from the process's own cgroup up to the mount and takes the minimum.
    Paths the mount does not show (a container without its own cgroup namespace) are skipped. The mount itself, which then is
    the container's cgroup, is always included. `memory.high` counts as a limit: above it the kernel throttles, which stalls a
    training run rather than ending it.

    GB10 and the GTT of AMD APUs charge the accelerator's memory to no cgroup: there the limits bound host memory only.
    """
    found = [*_v2_limits(sources), *_v1_limits(sources)]
    if not found:
        return None
    lowest = min(found, key=lambda limit: limit.total)
    return MemoryLimit(total=lowest.total, headroom=min(limit.headroom for limit in found), source=lowest.source)


def cpu_quota(sources: Sources) -> float | None:
    """Return the processor time the cgroups allow, in cores (2.5 = two and a half), or None."""
    quotas = []
    for folder in _v2_folders(sources):
        words = (read_text(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _v1_folders(sources, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


def limit_events(sources: Sources) -> dict[str, int]:
    """Return how often this process's cgroup met its limit, by event.

    The events are `"max"` (delayed allocations) and `"oom"` (failed or killed). They count since the cgroup began, from
    `memory.events` (v2) or `memory.failcnt` (v1, `"max"` only). Without either the result is empty.
    """
    for folder in _v2_folders(sources):
        lines = [line.split() for line in (read_text(folder / "memory.events") or "").splitlines()]
        found = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
        if found:
            return {name: found[name] for name in ("max", "oom") if name in found}
    for folder in _v1_folders(sources, "memory"):
        count = _number(folder / "memory.failcnt")
        if count is not None:
            return {"max": count}
    return {}


def stall_microseconds(sources: Sources) -> int | None:
    """Return the time all tasks of this cgroup have waited for memory (v2), None if unknown."""
    counts = (full_stall(read_text(folder / "memory.pressure")) for folder in _v2_folders(sources))
    return next((count for count in counts if count is not None), None)


def full_stall(text: str | None) -> int | None:
    """Return the microseconds of the `full` line of a PSI file, None without one."""
    for line in (text or "").splitlines():
        kind, _, fields = line.partition(" ")
        total = fields.rpartition("total=")[2].strip()
        if kind == "full" and total.isdigit():
            return int(total)
    return None


def _v2_limits(sources: Sources) -> list[MemoryLimit]:
    limits = []
    folders = _v2_folders(sources)
    for folder in folders:
        bounds = [(n, name) for name in ("memory.max", "memory.high") if (n := _number(folder / name)) is not None]
        if bounds:
            total, name = min(bounds)
            where = _label(folder, name, mount=folders[-1])
            limits.append(_limit(folder, total=total, source=where, usage="memory.current", cache="inactive_file"))
    return limits


def _v1_limits(sources: Sources) -> list[MemoryLimit]:
    limits = []
    folders = _v1_folders(sources, "memory")
    for folder in folders:
        total = _number(folder / "memory.limit_in_bytes")
        if total is not None and total < _V1_UNLIMITED:
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
            where = _label(folder, "memory.limit_in_bytes", mount=folders[-1])
            limits.append(_limit(folder, total=total, source=where, usage=usage, cache=cache))
    return limits


def _limit(folder: Path, *, total: int, source: str, usage: str, cache: str) -> MemoryLimit:
    used = (_number(folder / usage) or 0) - _stat(folder / "memory.stat", cache)
    return MemoryLimit(total=total, headroom=max(0, total - max(0, used)), source=source)


def _label(folder: Path, name: str, *, mount: Path) -> str:
    inside = folder.relative_to(mount).as_posix()
    return f"{name} of cgroup /{'' if inside == '.' else inside}"


def _v2_folders(sources: Sources) -> list[Path]:
    root = sources.sys / "fs" / "cgroup"
    path = next((path for number, _, path in _memberships(sources) if number == "0"), None)
    if path is None:
        return []
    mount = root / "unified" if (root / "unified").is_dir() else root
    return _ancestors(mount, path)


def _v1_folders(sources: Sources, controller: str) -> list[Path]:
    root = sources.sys / "fs" / "cgroup"
    for number, controllers, path in _memberships(sources):
        if number != "0" and controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
            mount = next((mount for mount in mounts if mount.is_dir()), None)
            return _ancestors(mount, path) if mount else []
    return []


def _memberships(sources: Sources) -> list[tuple[str, str, str]]:
    lines = (read_text(sources.proc / "self" / "cgroup") or "").splitlines()
    split = [line.split(":", 2) for line in lines]
    return [(parts[0], parts[1], parts[2]) for parts in split if len(parts) == 3]


def _ancestors(mount: Path, path: str) -> list[Path]:
    """Return the existing folders from the cgroup `path` up to and including the mount."""
    inside = PurePosixPath(path.lstrip("/"))
    folders = [mount / step for step in (inside, *inside.parents)]
    return [folder for folder in dict.fromkeys(folders) if ".." not in folder.parts and folder.is_dir()]


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, name: str) -> int:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0
