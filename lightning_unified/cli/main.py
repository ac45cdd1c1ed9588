"""Entry point of `python -m lightning_unified`: dispatch to train (the default) or another command."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from lightning_unified.cli.failure import report_failure
from lightning_unified.errors import ConfigurationError

__all__ = ["main"]

_USAGE = """\
python -m lightning_unified [train] [overrides …]   train inside a memory budget; train --help lists groups and keys
python -m lightning_unified plan [overrides …]      predict the peak of a step, choose the best plan that fits, compare machines
python -m lightning_unified doctor [--json]         show this machine's memory, capabilities, and the memory tier that fits
python -m lightning_unified watch [--once] [--json] show pools, pressure, swap, GPU use, and the runs on this machine, live
python -m lightning_unified report DIR [DIR …]      write runs as one HTML page: memory, the plan, losses, side by side
"""


_MODULES = {"doctor": "doctor", "plan": "plan.command", "watch": "watch.command", "report": "report.command"}
_COMMANDS = ("train", *_MODULES)


def _run(command: str, arguments: list[str]) -> int:
    """Import one command, because each loads slowly, and run it."""
    if command == "train":
        from lightning_unified.cli.train import train

        return train(arguments, program="-m lightning_unified train")
    return importlib.import_module(f"lightning_unified.cli.{_MODULES[command]}").main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named first in `arguments` (default: `sys.argv`) and return its exit code.

    Overrides without a command go to `train`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    first = given[0] if given else ""
    if first in {"-h", "--help", "help"}:
        sys.stdout.write(_USAGE)
        return 0
    try:
        if first in _COMMANDS:
            return _run(first, given[1:])
        if not first or first.startswith("-") or "=" in first:
            return _run("train", given)
        near = difflib.get_close_matches(first, _COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigurationError(
            f"{first}: there is no such command{hint} Commands are {', '.join(_COMMANDS)}; an override is written key=value."
        )
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)
