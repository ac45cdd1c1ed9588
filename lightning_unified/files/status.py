"""Status file of a running fit, in the user's state folder.

`lightning-unified watch` reads it.
"""

import json
import logging
import os
import platform
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["RunFigures", "RunRecord", "RunStatus", "parse_record"]

_RECENT = 30  # records: the last minute at two seconds each; as many steps if they take longer

log = logging.getLogger("lightning_unified")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """State of a run after a batch. Unknown figures are None.

    Attributes:
        directory: Directory the run writes to.
        module: Class name of the module in training.
        device: As torch writes it, within that process: `"cuda:0"`, `"mps"`, `"cpu"`.
        step: Number of optimizer steps done.
        total_steps: Number of optimizer steps of the whole run.
        loss: The loss of the last batch; "nan" or "inf" as text, because JSON has no such numbers.
        effective_batch_size: Rows of the batch the optimizer sees.
        micro_batch_size: Rows that run at once.
        allocated_bytes: Bytes of live tensors; on a CPU the resident bytes of the process.
        reserved_bytes: Bytes the allocator or the driver holds for the process.
        peak_bytes: Peak of bytes in use since the fit began.
        peak_source: Name of the counter of `peak_bytes`.
        budget_bytes: Bytes the run may use.
        recoveries: Number of steps repeated after an out-of-memory error.
        rank: Number of the process among those of its run.
        ranks: Number of processes of the run.
        run: Name of the run, the same for all its processes; None for a run of one.
    """

    directory: str | None
    module: str
    device: str
    step: int
    total_steps: int | None
    loss: float | str | None
    effective_batch_size: int | None
    micro_batch_size: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    peak_source: str
    budget_bytes: int | None
    recoveries: int
    rank: int = 0
    ranks: int = 1
    run: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Content of the status file.

    Attributes:
        pid: Process id.
        host: Machine of the process: several machines may share a home folder, and pids of different machines are unrelated.
        started: Start of the fit, ISO 8601 in UTC.
        updated: Time of writing, likewise.
        seconds_per_step: Mean time of the last steps, with validation and saving; None before the second record.
        figures: State of the run at that time.
    """

    pid: int
    host: str
    started: str
    updated: str
    seconds_per_step: float | None
    figures: RunFigures

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the present speed; None if unknown."""
        figures = self.figures
        if figures.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, figures.total_steps - figures.step) * self.seconds_per_step

    def as_json(self) -> dict[str, Any]:
        """Return one flat object for JSON; unknown is null."""
        record = asdict(self)
        return {**record.pop("figures"), **record, "seconds_left": self.seconds_left}


def parse_record(text: str) -> RunRecord | None:
    """Return the record in `text`; None without one, or if another version wrote it."""
    try:
        flat = json.loads(text)
        own = {field.name: flat[field.name] for field in fields(RunRecord) if field.name != "figures"}
        datetime.fromisoformat(own["updated"])
        return RunRecord(**own, figures=RunFigures(**_figures_in(flat)))
    except (ValueError, KeyError, TypeError):
        return None


def _figures_in(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the figures in a record.

    Those that an earlier version did not write have their defaults.
    """
    return {one.name: flat[one.name] for one in fields(RunFigures) if one.name in flat or one.default is MISSING}


class RunStatus:
    """Writes the status file of one process and removes it at the end. It never fails a run.

    Args:
        directory: Folder of the files; None writes nothing.
        every_s: Least seconds between two writes. In between, `tell` costs one look at the clock.
    """

    def __init__(self, directory: Path | None, *, every_s: float = 2.0) -> None:
        self._pid, self._host = os.getpid(), platform.node()
        name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', self._host)}-{self._pid}.json"
        self._path = None if directory is None else directory / name
        self._every_s = every_s
        self._next = 0.0
        self._started = _now()
        self._progress: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def tell(self, figures: Callable[[], RunFigures]) -> None:
        """Write the result of `figures` if a write is due; otherwise do not call it."""
        now = time.monotonic()
        if self._path is None or now < self._next:
            return
        self._next = now + self._every_s
        try:
            found = figures()
            self._progress.append((now, found.step))
            self._write(self._path, found)
        except Exception as error:
            log.debug("`watch` will not list this run: %s: %s", type(error).__name__, error)
            self.end()

    def end(self) -> None:
        """Remove the file and stop writing."""
        path, self._path = self._path, None
        if path is None:
            return
        for each in (path, path.with_suffix(".tmp")):
            try:
                each.unlink(missing_ok=True)
            except OSError as error:
                log.debug("%s stays: %s", each, error)

    def _seconds_per_step(self) -> float | None:
        (began, first), (ended, last) = self._progress[0], self._progress[-1]
        return (ended - began) / (last - first) if last > first else None

    def _write(self, path: Path, figures: RunFigures) -> None:
        own = {"pid": self._pid, "host": self._host, "started": self._started, "updated": _now()}
        record = RunRecord(**own, seconds_per_step=self._seconds_per_step(), figures=figures)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(record.as_json()))
        unfinished.replace(path)  # a reader sees the old file or the new one


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
