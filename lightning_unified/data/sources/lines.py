"""Read a user's text files: UTF-8, and JSON lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["json_rows", "read_utf8"]


def read_utf8(file: Path) -> str:
    """Return the content of a file, without a byte-order mark.

    Raises:
        ValueError: If it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 at byte {error.start}; save it as UTF-8.") from error


def json_rows(text: str, *, source: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `source:line` and the object of each line that is not blank.

    Raises:
        ValueError: If a line is not JSON, or no object.
    """
    # not splitlines(): a JSON string may contain U+2028, U+0085 and other line separators
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a row is an object, as in {{...}}; this one is {type(row).__name__}.")  # noqa: TRY004 - a wrong value in a file
        yield where, row
