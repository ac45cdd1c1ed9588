"""Find this user's live runs by their record files, and remove the files of dead ones."""

import os
import platform
import re
import time
from datetime import datetime
from pathlib import Path

from lightning_unified.hardware import Sources
from lightning_unified.hardware.sources import read_text
from lightning_unified.status import RunRecord, parse_record

__all__ = ["running"]

_PATIENCE_S = 3.0
_CLOCK_SLACK_S = 60.0  # setting the clock moves the boot time
_SILENT_S = 600.0  # where processes cannot be listed, a run without updates for this long counts as ended
_PS_LINE = re.compile(r"\s*(\d+)\s+(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)\s*")  # pid and [[dd-]hh:]mm:ss
_FORGOTTEN_S = 7 * 86400.0  # files of another machine or version are kept for a week


def running(directory: Path | None, sources: Sources) -> list[RunRecord]:
    """Return the records of live runs on this machine, oldest first; remove the files of dead ones.

    Args:
        directory: The folder of the record files, from `runs_directory`; None or absent means no runs.
        sources: Lists processes: procfs, else `ps`.
    """
    found = []
    for path in sorted(directory.glob("*")) if directory is not None else []:
        record = parse_record(read_text(path) or "") if path.suffix == ".json" else None
        if record is None or not _is_here(record, sources):
            ended = _untouched_s(path) > _FORGOTTEN_S
        else:
            ended = _has_ended(record, sources)
            found += [] if ended else [record]
        if ended:
            _remove(path)
    return sorted(found, key=lambda record: (record.started, record.pid))


def _is_here(record: RunRecord, sources: Sources) -> bool:
    """Return whether a record is of this machine.

    On macOS it always is: the machine's name changes with the network, and its home is local.
    """
    return sources.platform == "darwin" or record.host == platform.node()


def _untouched_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _has_ended(record: RunRecord, sources: Sources) -> bool:
    """Return whether the process is gone, or its id belongs to a process that began after the record was written."""
    known, began = _process(record.pid, sources)
    updated = datetime.fromisoformat(record.updated).timestamp()
    if not known:
        return time.time() - updated > _SILENT_S
    return began is None or began > updated + _CLOCK_SLACK_S


def _process(pid: int, sources: Sources) -> tuple[bool, float | None]:
    """Return whether processes can be listed, and the start of process `pid`.

    The start is in seconds since 1970; None if there is no such process.

    Source:
        Linux `man 5 proc`: field 3 of `stat` is the state, field 22 the ticks from boot to the start. Fields are counted from behind
        the name, which may contain any character. `ps` is POSIX.
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
    own = os.getpid()  # always exists: a list without it is no answer
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
