"""Command frame of `python -m lightning_unified.models.<name>`: parser, exit codes, errors."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

__all__ = ["add_device", "command_parser", "read_text", "run_command", "shows_colours"]


def command_parser(
    model: str, *, description: str | None
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    """Return the parser of a model's commands, and the group to which each command is added.

    Args:
        model: Name of the model's package, as in "gearhead".
        description: The text above the list of commands.
    """
    parser = argparse.ArgumentParser(prog=f"python -m lightning_unified.models.{model}", description=description)
    return parser, parser.add_subparsers(dest="command", required=True)


def add_device(command: argparse.ArgumentParser) -> None:
    """Add `--device` to a command."""
    command.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="default %(default)s")


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, dialogue: bool = False) -> int:
    """Run the chosen command and return its exit code: 0 done, 1 failed, 2 invalid argument.

    An error is one line on standard error. With LIGHTNING_UNIFIED_DEBUG=1 it is raised with its traceback.

    Args:
        parser: Each of its commands sets `run`, a function of the parsed arguments.
        arguments: The command line; None for that of the process.
        dialogue: Whether a person talks with the command. Ctrl-C and the end of standard input then end it with 0;
            otherwise Ctrl-C gives 1.
    """
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has read enough; redirect, or Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as end:  # Rich's way to end a command whose reader has read enough
        if not isinstance(end.__context__, BrokenPipeError):
            raise
    except (ValueError, FileNotFoundError) as error:
        return _fail(error, code=2)
    except (RuntimeError, OSError) as error:
        return _fail(error, code=1)
    except KeyboardInterrupt:
        print()
        return 0 if dialogue else 1
    except EOFError:
        if not dialogue:
            raise
        print()
    return 0


def shows_colours(console: Console) -> bool:
    """Return whether colours are seen: on a terminal that has them, and without NO_COLOR."""
    return console.color_system is not None and not console.no_color


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not UTF-8 text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give a text file, or - for standard input.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first.") from error


def _fail(error: Exception, *, code: int) -> int:
    if os.environ.get("LIGHTNING_UNIFIED_DEBUG") == "1":
        raise error
    print(f"error: {error}", file=sys.stderr)
    return code
