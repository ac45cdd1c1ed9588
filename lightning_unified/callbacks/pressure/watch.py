"""The thread that samples memory pressure, and the trace file that survives a freeze."""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from lightning_unified.hardware.pressure.reader import Pressure
from lightning_unified.hardware.reading import Figure

__all__ = ["PressureTrace", "PressureWatch", "Verdict"]

log = logging.getLogger("lightning_unified")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A summary of the samples so far.

    Attributes:
        pressure: The newest sample.
        index: The number of samples.
        pressed: The number of newest samples in a row with level warn or critical.
        critical: The number of newest samples in a row with level critical.
        calm: The number of newest samples in a row with level normal; an unknown sample is neither calm nor pressed.
    """

    pressure: Pressure
    index: int = 0
    pressed: int = 0
    critical: int = 0
    calm: int = 0

    def followed_by(self, pressure: Pressure) -> "Verdict":
        """Return the verdict with one more sample."""
        return Verdict(
            pressure=pressure,
            index=self.index + 1,
            pressed=self.pressed + 1 if pressure.level in ("warn", "critical") else 0,
            critical=self.critical + 1 if pressure.level == "critical" else 0,
            calm=self.calm + 1 if pressure.level == "normal" else 0,
        )


class PressureTrace:
    """Appends JSON lines and flushes each to the disk, so that they survive a freeze.

    The first line creates the file.

    Args:
        path: The file; None writes nothing.

    Attributes:
        step: Optimizer steps done, written with each line; None while unknown.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.step: int | None = None

    def write(self, pressure: Pressure, action: str) -> None:
        """Append a sample and the action taken; after a failed write, warn once and stop writing."""
        if self._path is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "step": self.step,
            "level": pressure.level,
            "available_bytes": pressure.available.bytes,
            "available_source": pressure.available.source,
            "swap_out_bytes_per_s": pressure.swap_out_bytes_per_s,
            "decompressed_bytes_per_s": pressure.decompressed_bytes_per_s,
            "stall_share": pressure.stall_share,
            "reasons": list(pressure.reasons),
            "action": action,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, (json.dumps(line) + "\n").encode())  # one write, so that two threads' lines never mix
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("Memory pressure is no longer written to %s: %s", self._path, error)
            self._path = None


class PressureWatch:
    """Samples the pressure in its own thread, from `start` to `end`.

    The first sample that makes pressure certain is written to the trace at once: the training thread may be stuck in a batch.

    Args:
        read: Takes a sample; an exception counts as an unknown sample.
        every_s: Seconds between samples.
        samples: Number of equal samples in a row that make a level certain.
        trace: The file for changes of the level.

    Attributes:
        verdict: The summary of the samples so far.
        thrashing: The reason why the run's own steps are thrashing; while not empty, every sample is critical.
    """

    def __init__(self, read: Callable[[], Pressure], *, every_s: float, samples: int, trace: PressureTrace) -> None:
        self._read, self._every_s, self._samples, self._trace = read, every_s, samples, trace
        self._over = threading.Event()
        self._failed = False
        self._level = "normal"
        self._thread = threading.Thread(target=self._run, name="memory-pressure", daemon=True)
        self.verdict = Verdict(pressure=_unknown("no sample yet"))
        self.thrashing = ""

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def end(self) -> None:
        """End the thread; wait at most a second, because a sample may hang in the kernel."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def sample(self) -> None:
        """Take one sample and replace `verdict` as a whole, so that reading it needs no lock."""
        try:
            pressure = self._read()
        except Exception as error:
            pressure = _unknown(f"{type(error).__name__}: {error}")
            if not self._failed:
                log.warning("Memory pressure cannot be read: %s", pressure.reasons[0])
            self._failed = True
        if thrashing := self.thrashing:
            pressure = replace(pressure, level="critical", reasons=(thrashing, *pressure.reasons))
        verdict = self.verdict.followed_by(pressure)
        level = "critical" if verdict.critical >= self._samples else "warn" if verdict.pressed >= self._samples else ""
        if not level and verdict.calm >= self._samples:
            level = "normal"
        self.verdict = verdict
        if level and level != self._level:
            self._level = level
            self._trace.write(pressure, "over" if level == "normal" else "noticed")

    def _run(self) -> None:
        while not self._over.is_set():
            self.sample()
            self._over.wait(self._every_s)


def _unknown(reason: str) -> Pressure:
    return Pressure(
        level="unknown",
        available=Figure(None, f"unknown: {reason}"),
        swap_out_bytes_per_s=None,
        stall_share=None,
        reasons=(reason,),
    )
