"""Read texts to classify from files and standard input."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_unified.data.sources.lines import json_rows
from lightning_unified.models.commands import read_text

__all__ = ["Given", "read_texts"]

Given = tuple[str, str]  # place of origin, text


def read_texts(sources: Sequence[str], *, lines: bool = False, field: str = "text") -> list[Given]:
    """Return the texts in `sources`, each with the place it came from.

    A `.csv`, `.tsv` or `.jsonl` file has a text in each row, under the name `field`. Any other file is one text, or one text for each
    line with `lines`. `-` is standard input, one text for each line. Empty lines are left out.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is not UTF-8 text, has no such field, or there is no text at all.
    """
    found: list[Given] = []
    for source in sources:
        if source == "-":
            found += _lines(sys.stdin.read(), "-")
            continue
        text, kind = read_text(Path(source)), Path(source).suffix.lower()
        if kind in {".csv", ".tsv"}:
            found += _table(text, source, field, "\t" if kind == ".tsv" else ",")
        elif kind == ".jsonl":
            found += _records(text, source, field)
        else:
            found += _lines(text, source) if lines else [(source, text)]
    if not found:
        raise ValueError(f"there is no text in {', '.join(sources)}.")
    return found


def _lines(text: str, source: str) -> list[Given]:
    return [(f"{source}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _table(text: str, source: str, field: str, delimiter: str) -> list[Given]:
    rows = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
    columns = rows.fieldnames
    if not columns:
        raise ValueError(f"{source} is empty; its first line must name the columns, {field!r} among them.")
    if field not in columns:
        raise ValueError(f"{source} has no column {field!r}, but {', '.join(columns)}; name one with --field.")
    return [(f"{source}:{number}", row[field] or "") for number, row in enumerate(rows, 1)]


def _records(text: str, source: str, field: str) -> list[Given]:
    found = []
    for place, record in json_rows(text, source=source):
        if not isinstance(record.get(field), str):
            raise ValueError(  # noqa: TRY004 - a wrong value in a file
                f"{place} has no text under {field!r}; name the field with --field."
            )
        found.append((place, record[field]))
    return found
