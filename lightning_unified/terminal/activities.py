"""A line about work that takes longer than two seconds, on standard error."""

import _thread
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning_unified.terminal.lines import is_live, say
from lightning_unified.terminal.streams import LastingStream
from lightning_unified.units import format_duration

__all__ = ["activity", "is_first_process"]

_AFTER_S = 2.0
_LIVE_S, _PLAIN_S = 1.0, 30.0  # between two updates, on a terminal and elsewhere
_running = threading.Lock()


@contextmanager
def activity(doing: str) -> Iterator[None]:
    """Show `doing` with its time so far, if it takes longer than two seconds.

    The last line has the whole time.

    Inside another activity, on all processes but the first, and where memory is too short for a thread, it shows nothing.
    """
    if not is_first_process() or not _running.acquire(blocking=False):
        yield
        return
    over, line = threading.Event(), _Line(doing, began=time.monotonic())
    with suppress(RuntimeError, MemoryError):
        # `threading.Thread.start` waits until the thread runs: for ever, if memory runs out as it begins
        _thread.start_new_thread(_show, (line, over))
    try:
        yield
    finally:
        over.set()
        line.end()
        _running.release()


class _Line:
    """The line of one activity: overwritten on a terminal, repeated now and then elsewhere.

    Nothing is shown after `end`.
    """

    def __init__(self, doing: str, *, began: float) -> None:
        self._doing, self._began = doing, began
        self._writing = threading.Lock()
        self._is_over = False
        self._is_live, self._width = is_live(sys.stderr), 0
        self._is_shown = False

    @property
    def every_s(self) -> float:
        """Seconds between two updates."""
        return _LIVE_S if self._is_live else _PLAIN_S

    def update(self) -> None:
        """Show the activity with the time since it began."""
        with self._writing:
            if not self._is_over:
                self._write(f"{self._doing} … {format_duration(round(time.monotonic() - self._began))}", last=False)

    def end(self) -> None:
        """Show the whole time, if the activity was shown."""
        has_lock = self._writing.acquire(timeout=1)  # a write may hang, to a pipe that nobody reads
        self._is_over = True
        if self._is_shown and has_lock:
            self._write(f"{self._doing}: {format_duration(time.monotonic() - self._began)}", last=True)
        if has_lock:
            self._writing.release()

    def _write(self, text: str, *, last: bool) -> None:
        first, self._is_shown = not self._is_shown, True
        if not self._is_live:
            say(text, sys.stderr)
            return
        padded, self._width = "\r" + text.ljust(self._width), len(text)
        if first:  # without a carriage return in front, because a progress bar may stand there
            padded = ("" if isinstance(sys.stderr, LastingStream) else "\n") + f"{text}\r{text}"
        try:
            sys.stderr.write(padded + "\n" * last)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def _show(line: _Line, over: threading.Event) -> None:
    wait = _AFTER_S
    while not over.wait(wait):
        line.update()
        wait = line.every_s


def is_first_process() -> bool:
    """Return whether this is the first of a run's processes, by the variables that launchers set."""
    return all(os.environ.get(name, "0") in ("", "0") for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))
