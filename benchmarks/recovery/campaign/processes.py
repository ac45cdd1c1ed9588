"""Run a function in a forked process of its own, which can be ended from outside."""

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ended", "Kill", "in_process"]

_LOOK = 0.002  # seconds between two looks at a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A signal from outside.

    Attributes:
        number: Which.
        after: Seconds from when the file `started` is there.
        started: The file.
    """

    number: signal.Signals
    after: float
    started: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        code: Exit code; minus the signal's number if a signal ended it.
        hung: Whether it was still running after its time, and was killed for that.
        error: Name of the exception it ended with, "" without one.
        text: The exception's text.
        seconds: How long it ran.
        was_signalled: Whether the signal from outside was sent before it ended.
    """

    code: int
    hung: bool
    error: str
    text: str
    seconds: float
    was_signalled: bool


def in_process(
    work: Callable[[], None],
    *,
    log: Path,
    timeout: float,
    kill: Kill | None = None,
    beside: Callable[[int], None] | None = None,
) -> Ended:
    """Run `work` in a fork of this process.

    This process must have no threads and must not have used autograd.

    Args:
        work: What to run. An exception ends the process with code 1, `SystemExit` with its own.
        log: File that what it prints is appended to.
        timeout: Seconds after which it hangs, and is killed.
        kill: A signal to send.
        beside: Called with the process's id all the while it runs, every few milliseconds.
    """
    failure = log.with_suffix(".error")
    failure.unlink(missing_ok=True)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_and_exit(work, log=log, failure=failure)
    code, hung, was_signalled = _wait(child, deadline=begun + timeout, kill=kill, beside=beside)
    error, _, text = failure.read_text().partition("\n") if failure.exists() else ("", "", "")
    seconds = time.monotonic() - begun
    return Ended(code=code, hung=hung, error=error, text=text, seconds=seconds, was_signalled=was_signalled)


def _wait(
    child: int, *, deadline: float, kill: Kill | None, beside: Callable[[int], None] | None
) -> tuple[int, bool, bool]:
    at: float | None = None
    hung = was_signalled = False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), hung, was_signalled
        now = time.monotonic()
        if kill is not None and at is None and kill.started.exists():
            at = now + kill.after
        if kill is not None and at is not None and not was_signalled and now >= at:
            os.kill(child, kill.number)
            was_signalled = True
        if now > deadline and not hung:
            os.kill(child, signal.SIGKILL)
            hung = True
        if beside is not None:
            beside(child)
        time.sleep(_LOOK)


def _run_and_exit(work: Callable[[], None], *, log: Path, failure: Path) -> None:
    """Run, note an exception, and leave without what the parent registered for its own end."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
        failure.write_text(f"{type(error).__name__}\n{error}")
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
