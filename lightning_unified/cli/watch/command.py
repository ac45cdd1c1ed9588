"""`watch`: show pools, pressure, swap, GPU use and runs, live, on every platform."""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from lightning_unified.cli.failure import TERMINATED, report_failure
from lightning_unified.cli.watch.snapshot import Observer, Snapshot
from lightning_unified.cli.watch.view import show
from lightning_unified.errors import ConfigurationError, RunError
from lightning_unified.files.folders import runs_folder
from lightning_unified.hardware import Sources

__all__ = ["main"]

_RATE_S = 0.5  # `--once` reads twice this far apart, so that its snapshot has rates


def main(argv: list[str]) -> int:
    """Show the machine until Ctrl-C, or once, and return the exit code.

    It is 0, 1 if the log fails, 2 for invalid arguments, 143 after SIGTERM.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as done:
        return int(done.code or 0)
    observer = Observer(Sources.without_torch(), directory=runs_folder())
    try:
        log = _Log(arguments.log)
        with _terminated_is_an_exit(), _printer(as_json=arguments.json, once=arguments.once) as shown:
            for snapshot in _snapshots(observer, every_s=arguments.every, once=arguments.once):
                log.append(snapshot)
                shown(snapshot)
    except (ConfigurationError, RunError) as error:
        return report_failure(error)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader closed the pipe; redirect, or Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as ended:  # SIGTERM; or Rich, whose reader has closed the pipe
        return 0 if isinstance(ended.__context__, BrokenPipeError) else int(ended.code or 0)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_unified watch", description=__doc__)
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, and nothing else")
    parser.add_argument("--log", type=Path, metavar="FILE", help="also append each snapshot to FILE as a line of JSON")
    parser.add_argument(
        "--every", type=_seconds, default=2.0, metavar="SECONDS", help="seconds between snapshots (default 2)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds from 0.1 to 86400")
    return seconds


def _snapshots(observer: Observer, *, every_s: float, once: bool) -> Iterator[Snapshot]:
    if once:
        observer.look(time.monotonic())
        time.sleep(_RATE_S)
    yield observer.look(time.monotonic())
    while not once:
        time.sleep(every_s)
        yield observer.look(time.monotonic())


class _Log:
    """Append snapshots to a file; each line reaches the operating system before the next snapshot.

    Args:
        path: The file; None writes nothing.

    Raises:
        ConfigurationError: If the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = None if path is None else path.open("a", buffering=1)
        except OSError as error:
            raise ConfigurationError(
                f"--log {path} cannot be written: {error.strerror or error}; name a file in a folder that is there and yours."
            ) from error

    def append(self, snapshot: Snapshot) -> None:
        """Write one line.

        Raises:
            RunError: If the write fails.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(snapshot.as_json()) + "\n")
        except OSError as error:
            raise RunError(
                f"--log {self._file.name} could not be written: {error.strerror or error}; free some space or name another file."
            ) from error


@contextmanager
def _printer(*, as_json: bool, once: bool) -> Iterator[Callable[[Snapshot], None]]:
    """Yield a function that shows a snapshot.

    It prints a line of JSON, a live screen, or text where there is no terminal.
    """
    console = Console(highlight=False)
    if as_json:
        yield lambda snapshot: print(json.dumps(snapshot.as_json()), flush=True)
    elif once or not console.is_terminal or console.is_dumb_terminal:
        end = "\n" if once else "\n\n"
        yield lambda snapshot: console.print(show(snapshot, width=_width()), end=end, soft_wrap=True)
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda snapshot: live.update(show(snapshot, width=_width()), refresh=True)


def _width() -> int:
    """Return the columns of the terminal, or of `COLUMNS`; 80 without either."""
    return shutil.get_terminal_size().columns


@contextmanager
def _terminated_is_an_exit() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that the terminal is restored."""

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
