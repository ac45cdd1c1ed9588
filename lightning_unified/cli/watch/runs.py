"""Find this user's live runs by their record files, and remove the files of dead ones."""

import contextlib
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from lightning_unified.cli.config.bounded_files import printable
from lightning_unified.files.status import RunRecord, parse_record
from lightning_unified.hardware import Sources
from lightning_unified.hardware.sources import read_text

__all__ = ["grouped", "running"]

_CLOCK_SLACK_S = 60.0  # setting the clock moves the boot time
_FORGOTTEN_S = 7 * 86400.0  # files of another machine or version are kept for a week


def running(directory: Path | None, sources: Sources) -> list[RunRecord]:
    """Return the records of live runs on this machine, oldest first.

    Remove the files of dead ones.

    Args:
        directory: The folder of the record files, from `runs_folder`; None or absent means no runs.
        sources: Returns when a process began.
    """
    found = []
    for path in sorted(directory.glob("*")) if directory is not None else []:
        record = parse_record(read_text(path) or "") if path.suffix == ".json" else None
        if record is None or not _is_here(record, sources):
            ended = _untouched_s(path) > _FORGOTTEN_S
        else:
            ended = _has_ended(record, sources)
            found += [] if ended else [_printable(record)]
        if ended:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda record: (record.started, record.pid))


def grouped(records: Iterable[RunRecord]) -> list[list[RunRecord]]:
    """Return the processes of each run in the order of their ranks; runs keep the order of their first process."""
    groups: dict[tuple[str, str | int], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.host, record.figures.run or record.pid), []).append(record)
    return [sorted(group, key=lambda record: record.figures.rank) for group in groups.values()]


def _printable(record: RunRecord) -> RunRecord:
    """Return `record` with texts that are safe on a terminal, because another program wrote them."""
    texts = {name: printable(text) for name, text in asdict(record.figures).items() if isinstance(text, str)}
    return replace(record, host=printable(record.host), figures=replace(record.figures, **texts))


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
    """Return whether the process is gone, or another one has its id.

    The other one began after the record was written.
    """
    began = sources.process_start(record.pid)
    return began is None or began > datetime.fromisoformat(record.updated).timestamp() + _CLOCK_SLACK_S
