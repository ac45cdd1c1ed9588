"""Entry point of `python -m lightning_unified`: dispatch to a command.

Overrides without a command go to `train`.
"""

import difflib
import errno
import importlib
import sys
from collections.abc import Sequence

from lightning_unified.cli.failure import report_failure
from lightning_unified.errors import ConfigurationError, RunError
from lightning_unified.terminal import lasting_output

__all__ = ["main"]

_USAGE = """\
usage: python -m lightning_unified COMMAND [arguments]

  train        train inside a memory budget
  plan         predict a step's memory; find the best plan
  doctor       this machine's memory and the tier that fits
  watch        show memory, pressure and runs, live
  report       write runs as one HTML page
  consolidate  write a distributed checkpoint as one file

COMMAND --help tells more. For example:
  python -m lightning_unified train memory=debug
"""


_MODULES = {
    "doctor": "doctor",
    "plan": "plan.command",
    "watch": "watch.command",
    "report": "report.command",
    "consolidate": "consolidate",
}
_COMMANDS = ("train", *_MODULES)


def _run(command: str, arguments: list[str]) -> int:
    """Import one command, because each loads slowly, and run it."""
    if command == "train":
        from lightning_unified.cli.train import train

        return train(arguments, program="-m lightning_unified train")
    return importlib.import_module(f"lightning_unified.cli.{_MODULES[command]}").main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named first in `arguments` (default: `sys.argv`) and return its exit code.

    Overrides without a command go to `train`. Without any argument, show the commands.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["watch"]:  # it ends once its reader is gone
            return _run("watch", given[1:])
        with lasting_output() as output:
            code = _dispatch(given)
        if code == 0 and given[:1] != ["train"] and output.failure is not None:
            _check_written(output.failure)
        return code
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)


def _dispatch(given: list[str]) -> int:
    first = given[0] if given else "help"
    if first in {"-h", "--help", "help"}:
        sys.stdout.write(_USAGE)
        return 0
    try:
        if first in _COMMANDS:
            return _run(first, given[1:])
        if first.startswith("-") or "=" in first:
            return _run("train", given)
        near = difflib.get_close_matches(first, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigurationError(
            f"{first}: there is no such command{hint} Commands are {', '.join(_COMMANDS)}; an override is written key=value."
        )
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)


def _check_written(failure: OSError) -> None:
    """Raise an error if a result was not written; a closed pipe is no error."""
    if failure.errno != errno.EPIPE:
        raise RunError(f"standard output could not be written: {failure.strerror or failure}; free some space.")
