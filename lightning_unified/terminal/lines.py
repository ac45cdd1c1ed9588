"""Lines on a terminal: written, wrapped and shortened, and whether one may be overwritten."""

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["is_live", "label", "labelled", "listed", "say", "short_path", "wrapped"]

_labels: list[str] = []
_GLUE = "\N{NO-BREAK SPACE}"
_LONGEST_GLUED = 40  # characters, so that a part fits a narrow line


def label() -> str:
    """Return the prefix of this process's lines: its name and a blank.

    A process that has the terminal to itself has the prefix "".
    """
    return f"[{_labels[-1]}] " if _labels else ""


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Let lines begin with `name`, and overwrite none: several processes share the terminal."""
    _labels.append(name)
    try:
        yield
    finally:
        _labels.pop()


def is_live(stream: TextIO | None) -> bool:
    """Return whether a line of `stream` may be overwritten.

    It may if the stream is a terminal or a notebook of this process alone.
    """
    if stream is None or _labels:
        return False
    if "ipykernel" in sys.modules:
        return True
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (OSError, ValueError, AttributeError):
        return False


def say(text: str, stream: TextIO | None = None) -> None:
    """Write `text` as lines of its own in one write; a stream that is gone is no error."""
    stream = sys.stdout if stream is None else stream
    if stream is None:
        return
    try:
        stream.write("".join(f"{label()}{line}\n" for line in text.removesuffix("\n").split("\n")))
        stream.flush()
    except (OSError, ValueError):
        pass


def wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Return `text` in lines of at most `width` characters, indented from the second on.

    A longer word keeps its length.

    Lines break at blanks, and not at non-breaking ones, which become blanks.
    """
    after = " " * indent
    lines = textwrap.wrap(text, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines] or [""]


def listed(parts: Iterable[str]) -> str:
    """Join the non-empty parts into one text, which `wrapped` breaks only between them."""
    return ", ".join(part.replace(" ", _GLUE) if len(part) <= _LONGEST_GLUED else part for part in parts if part)


def short_path(path: str, width: int) -> str:
    """Return `path` in at most `width` characters.

    "…" replaces leading folders, then the middle of the last name.
    """
    if len(path) <= width:
        return path
    parts = path.replace("\\", "/").split("/")
    for first in range(1, len(parts)):
        if len(shown := "/".join(["…", *parts[first:]])) <= width:
            return shown
    kept = max(width - 3, 2)
    return f"…/{parts[-1][: kept - kept // 2]}…{parts[-1][-(kept // 2) :]}"
