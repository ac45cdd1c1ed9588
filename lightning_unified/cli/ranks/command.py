"""Commands that a run prints or starts: the one that continues it, and that of a further rank."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_unified.cli.config.overrides import key_of, parse_overrides, quoted
from lightning_unified.cli.config.resume import SavedRun

__all__ = ["rank_command", "resume_override", "short"]

_PLAIN = re.compile(r"[\w./-]+")


def rank_command(
    program: str, flags: Sequence[str], overrides: Sequence[str], saved: SavedRun | None, directory: Path
) -> list[str]:
    """Return the command of a further rank of the run in `directory`, which a strategy starts.

    Args:
        program: The command of the run, without its arguments.
        flags: Flags beside the overrides.
        overrides: The overrides of this run alone, if it is one of a sweep.
        saved: The run that is continued, if any.
        directory: The run's directory.
    """
    own = [text for text in overrides if key_of(parse_overrides([text])[0]) not in ("run_dir", "resume")]
    resume = [] if saved is None else [f"resume={quoted(saved.directory)}"]
    arguments = [*flags, *own, *resume, f"run_dir={quoted(directory)}"]
    return [sys.executable, *shlex.split(program)[1:], *arguments]


def resume_override(directory: Path) -> str:
    """Return `resume=…` as typed in a shell.

    Hydra needs quotes around a sweep's folders, which contain `=`.
    """
    path = short(directory)
    return f"resume={path}" if _PLAIN.fullmatch(path) else shlex.quote(f'resume="{path}"')


def short(path: Path) -> str:
    """Return `path` relative to the working directory if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
