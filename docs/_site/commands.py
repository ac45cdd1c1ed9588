"""Describe each command as Markdown, from its own parser."""

import argparse
from collections.abc import Iterator

from tests.repository.public_surface.subjects import parsers

__all__ = ["described"]

_TRAIN = """\
Train a model inside a memory budget. [Configuration](../configuration/index.md) lists groups and keys; `--trust` resumes a run whose files
name classes of your own ([Security](../../explanation/security.md)). The other flags are Hydra's.
"""
_COMPLETION = "print the completion script of a shell: install=bash, install=fish or install=zsh"


def described() -> str:
    """Return every command, its purpose and its arguments."""
    return "\n".join(line for command, parser in parsers() for line in _command(command, parser, depth=2))


def _command(command: str, parser: argparse.ArgumentParser, *, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} `{command}`\n"
    if command.endswith(" train"):
        yield _TRAIN
    elif parser.description:
        yield f"{' '.join(parser.description.split())}\n"
    rows = [row for action in parser._actions for row in _row(action, parser)]
    if rows:
        yield "| argument | default | meaning |\n|---|---|---|"
        yield from rows
        yield ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _command(f"{command} {name}", sub, depth=depth + 1)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)) or action.help == argparse.SUPPRESS:
        return
    value = "" if action.nargs == 0 else " " + _value(action)
    name = ", ".join(action.option_strings) + value if action.option_strings else _value(action)
    default = (
        ""
        if action.default in (None, False, [], argparse.SUPPRESS) or "%(default)" in (action.help or "")
        else f"`{action.default}`"
    )
    # Hydra's text of --shell-completion is no string, and names the running program.
    meaning = (
        parser._get_formatter()._expand_help(action)
        if isinstance(action.help, str)
        else _COMPLETION * bool(action.help)
    )
    cells = [f"`{name.strip()}`", default, " ".join(meaning.split())]
    yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _value(action: argparse.Action) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or action.dest.upper()
    text = " ".join(name) if isinstance(name, tuple) else str(name)
    return f"{text} …" if action.nargs in {"*", "+"} else text
