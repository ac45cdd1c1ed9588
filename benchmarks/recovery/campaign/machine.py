"""A small machine with one memory pool, made of real processes.

They are a run, a hog that fills the pool, and a warden that enforces its size.

What is in use is what the kernel says the two processes hold. The warden writes it where the run's `PressureGuard` looks for
`/proc/meminfo`, and moves the run's RLIMIT_AS with it, so that an allocation beyond what is left fails for real. A run that holds more
than there is all the same, for it touches late what it had asked for early, is killed, as the kernel would do.
"""

import contextlib
import mmap
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_unified.callbacks import PressureGuard
from lightning_unified.hardware import Pressure, PressureReader, Sources

__all__ = ["Guard", "Hog", "Machine"]

MIB = 2**20
_CHUNK = 4 * MIB
_SHORT = 0.05  # the share of the pool below which PressureReader warns (hardware/pressure/reader.py)
_KILL_ABOVE = 48 * MIB  # what the pool may be overrun by before the run is killed: late touches of pages, not growth


@dataclass(frozen=True, kw_only=True, slots=True)
class Hog:
    """Another program that needs memory.

    Attributes:
        after: Seconds from when the run trains to when it begins; by then the run has shown what it needs.
        rate: Bytes a second that it grows by.
        leaves: Bytes that it leaves to have, as it sees them; when the run gives some back, it takes them too.
        most: Bytes at which it is full.
        lasts: Seconds from when it begins to when it ends.
    """

    after: float
    rate: int
    leaves: int
    most: int
    lasts: float

    def run(self, folder: Path) -> None:
        """Grow, stay, and end."""
        held: list[mmap.mmap] = []
        begun = time.monotonic()
        while time.monotonic() - begun < self.lasts:
            grown = len(held) * _CHUNK
            due = (time.monotonic() - begun) * self.rate >= grown + _CHUNK
            if due and grown + _CHUNK <= self.most and available(folder) - _CHUNK >= self.leaves:
                chunk = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for page in range(0, _CHUNK, mmap.PAGESIZE):
                    chunk[page] = 1
                held.append(chunk)
            time.sleep(0.002)


def available(folder: Path) -> int:
    """Return the bytes that the machine's meminfo says can be had."""
    for line in (folder / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("meminfo has no MemAvailable")


class Guard(PressureGuard):
    """Looks at the machine's meminfo instead of this one's.

    Args:
        folder: Where it is.
        options: Of `PressureGuard`.
    """

    def __init__(self, folder: Path, **options) -> None:
        super().__init__(**options)
        self._folder = folder

    def reader(self) -> Callable[[], Pressure]:
        reader = PressureReader(Sources(torch=None, proc=self._folder, sys=self._folder))
        return lambda: reader.read(time.monotonic())


class Machine:
    """The warden: `tend` is called again and again with the run's process id.

    Args:
        folder: Of meminfo.
        started: The file that says that the run trains.
        spare: Bytes of the pool beyond the most that the run held before the hog began.
        hog: Who else is there.

    Attributes:
        hog_began: When the hog did, seconds since the epoch; None before that.
        short_since: When less than what counts as a shortage was left for the first time.
        killed: Whether the run held more than there is.
        least_available: The least that was left, bytes; below zero it was held beyond the pool.
    """

    def __init__(self, folder: Path, *, started: Path, spare: int, hog: Hog) -> None:
        self._folder, self._started, self._spare, self._hog = folder, started, spare, hog
        self._total = 0
        self._trains_since: float | None = None
        self._most_alone = 0
        self._hog_process = -1
        self._hog_at_first = 0
        self.hog_began: float | None = None
        self.short_since: float | None = None
        self.killed = False
        self.least_available: int | None = None
        self._write(total=8 * 2**30, left=8 * 2**30)

    def tend(self, run: int) -> None:
        """Look at both processes, tell what is left, and enforce it."""
        used = _resident(run)
        if not self._total:
            self._watch_alone(used)
            return
        left = self._total - used - max(_resident(self._hog_process) - self._hog_at_first, 0)
        if left < _SHORT * self._total and self.short_since is None:
            self.short_since = time.time()
        self.least_available = left if self.least_available is None else min(left, self.least_available)
        self._write(total=self._total, left=max(left, 0))
        with contextlib.suppress(ProcessLookupError):
            size = _virtual(run) + max(left, 0)
            resource.prlimit(run, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
            if left < -_KILL_ABOVE and not self.killed:
                self.killed = True
                os.kill(run, signal.SIGKILL)

    def _watch_alone(self, used: int) -> None:
        """Learn what the run needs; then the pool has its size, and the hog begins."""
        self._most_alone = max(self._most_alone, used)
        if self._trains_since is None and self._started.exists():
            self._trains_since = time.monotonic()
        if self._trains_since is not None and time.monotonic() - self._trains_since >= self._hog.after:
            self._total = self._most_alone + self._spare
            self._write(total=self._total, left=self._total - used)
            self._start_hog()

    def end(self) -> None:
        """End the hog."""
        if self._hog_process > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._hog_process, signal.SIGKILL)
            os.waitpid(self._hog_process, 0)
            self._hog_process = -1

    def _start_hog(self) -> None:
        self.hog_began = time.time()
        self._hog_process = os.fork()
        if self._hog_process == 0:
            try:
                self._hog.run(self._folder)
            finally:
                os._exit(0)
        self._hog_at_first = _resident(self._hog_process)  # pages it shares with whoever forked it

    def _write(self, *, total: int, left: int) -> None:
        new = self._folder / "meminfo.new"
        new.write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {left // 1024} kB\n", encoding="ascii")
        new.replace(self._folder / "meminfo")


def _virtual(process: int) -> int:
    return _statm(process)[0]


def _resident(process: int) -> int:
    return _statm(process)[1]


def _statm(process: int) -> tuple[int, int]:
    """Return a process's virtual size and private resident bytes; 0 if it is gone."""
    try:
        size, resident, shared = (int(word) for word in Path(f"/proc/{process}/statm").read_text().split()[:3])
    except (OSError, ValueError):
        return 0, 0
    return size * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE
