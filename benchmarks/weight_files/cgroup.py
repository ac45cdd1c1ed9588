"""Control group that counts, and may limit, this process's memory with the page cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_unified.hardware.sources import Sources

__all__ = ["Group", "entered", "missing", "remove"]

_ROOT = Path("/sys/fs/cgroup")
_FILES = {  # limit, peak, times the limit was met
    "v1": ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt"),
    "v2": ("memory.max", "memory.peak", "memory.events"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The control group that this process is in.

    Attributes:
        folder: Its folder.
        version: `"v1"` or `"v2"`.
    """

    folder: Path
    version: str

    @property
    def peak(self) -> int:
        """The most bytes that were charged to the group at any time."""
        return int((self.folder / _FILES[self.version][1]).read_text())

    @property
    def limit_met(self) -> int:
        """Number of times that the group met its limit; the kernel then reclaims pages, or kills."""
        words = (self.folder / _FILES[self.version][2]).read_text().split()
        return int(words[0] if self.version == "v1" else words[words.index("max") + 1])


def missing() -> str:
    """Return why no control group can be made here; empty if one can."""
    try:
        own, _ = _own()
        probe = own / f"lightning-unified-probe-{os.getpid()}"
        probe.mkdir()
        has_peak = any((probe / files[1]).exists() for files in _FILES.values())
        probe.rmdir()
    except (OSError, LookupError) as error:
        return f"no control group can be made here ({type(error).__name__}: {error})"
    return "" if has_peak else "this kernel counts no peak of a control group's memory"


@contextmanager
def entered(limit: int | None) -> Iterator[Group]:
    """Move this process into a new group below its own.

    Memory that the process has already stays charged to the old group.

    Args:
        limit: Bytes that the process may take from now on; None for no limit.

    Raises:
        OSError: If no group can be made, see `missing`.
    """
    own, version = _own()
    folder = own / f"lightning-unified-{os.getpid()}"
    folder.mkdir()
    try:
        if limit is not None:
            (folder / _FILES[version][0]).write_text(str(limit))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield Group(folder=folder, version=version)
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        folder.rmdir()


def remove(pid: int) -> None:
    """Remove the group of a process that ended inside `entered`; do nothing without one."""
    folder = _own()[0] / f"lightning-unified-{pid}"
    if folder.is_dir():
        folder.rmdir()


def _own() -> tuple[Path, str]:
    """Return the folder of this process's group in the memory hierarchy, and its version.

    Raises:
        LookupError: If the memory controller is in no hierarchy that is mounted here.
    """
    lines = [line.split(":", 2) for line in (Sources.live().proc / "self" / "cgroup").read_text().splitlines()]
    for number, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/"), "v1"
        if number == "0" and "memory" in _controllers(_ROOT / path.lstrip("/")):
            return _ROOT / path.lstrip("/"), "v2"
    raise LookupError("no memory controller")


def _controllers(folder: Path) -> list[str]:
    file = folder / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []
