"""The runs of this user on this machine, from the files they keep; what a killed run left is cleared away."""

import os
import platform
import time
from datetime import datetime
from pathlib import Path

from lightning_unified.hardware import Sources
from lightning_unified.hardware.sources import read_text
from lightning_unified.training.status import RunRecord, parse_record

__all__ = ["running"]

_PATIENCE_S = 3.0
_CLOCK_SLACK_S = 60.0  # a boot time moves when the clock is set
_SILENT_S = 600.0  # without any way to ask for a process, one that says nothing for so long counts as ended
_FORGOTTEN_S = 7 * 86400.0  # of another machine nothing can be asked


def running(directory: Path | None, sources: Sources) -> list[RunRecord]:
    """Return the records of the runs that live on this machine, the oldest first; remove the files of those that do not.

    Args:
        directory: Where the files are, as `runs_directory` says; None or absent is no run.
        sources: How to ask for processes: procfs, else `ps`.
    """
    found = []
    for path in sorted(directory.glob("*.json")) if directory is not None else []:
        record = parse_record(read_text(path) or "")
        if record is not None and record.host == platform.node() and not _has_ended(record, sources):
            found.append(record)
        elif record is None or record.host == platform.node() or _age(record) > _FORGOTTEN_S:
            _remove(path)
    return sorted(found, key=lambda record: (record.started, record.pid))


def _age(record: RunRecord) -> float:
    return time.time() - datetime.fromisoformat(record.updated).timestamp()


def _has_ended(record: RunRecord, sources: Sources) -> bool:
    """Return whether the process is gone, or its number has gone to another that began after the record was written."""
    known, began = _process(record.pid, sources)
    if not known:
        return _age(record) > _SILENT_S
    return began is None or began > datetime.fromisoformat(record.updated).timestamp() + _CLOCK_SLACK_S


def _process(pid: int, sources: Sources) -> tuple[bool, float | None]:
    """Return whether processes can be asked for, and when the one of that number began (seconds since 1970; None: there is none).

    Source:
        Linux `man 5 proc`: field 3 of `stat` is the state, field 22 the ticks from boot to the start; fields count from behind the
        name, which may hold anything. `ps` is POSIX.
    """
    boot = next(
        (
            line.split()[1]
            for line in (read_text(sources.proc / "stat") or "").splitlines()
            if line.startswith("btime ")
        ),
        "",
    )
    if boot.isdigit():
        rest = (read_text(sources.proc / str(pid) / "stat") or "").rpartition(")")[2].split()
        if len(rest) < 20 or rest[0] in "ZX":
            return True, None
        return True, int(boot) + int(rest[19]) / os.sysconf("SC_CLK_TCK")
    own = os.getpid()  # is always there: without it the answer is none
    out = sources.run(["ps", "-o", "pid=,etime=", "-p", f"{own},{pid}"], _PATIENCE_S) or ""
    ages = {words[0]: words[1] for words in map(str.split, out.splitlines()) if len(words) == 2}
    if str(own) not in ages:
        return False, None
    return True, time.time() - _seconds(ages[str(pid)]) if str(pid) in ages else None


def _seconds(etime: str) -> int:
    """Return the seconds of `[[dd-]hh:]mm:ss`."""
    days, _, clock = etime.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return int(days or 0) * 86400 + seconds


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
