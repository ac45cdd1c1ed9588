"""Read labelled texts: a table, JSON lines, or a folder with a subfolder per class.

- `.csv`, `.tsv`: a table separated by commas, semicolons, tabs or bars. Its first line names the columns, or columns are given by number.
- `.jsonl`: one object a line with a text and a label.
- a folder: a subfolder for each class with a `.txt` file for each text; or subfolders `train` and `test` of such.

Rows may also have a `group`, which a split keeps together, and a `split`, `train` or `test`, which then is the split. Other columns
are ignored. A row without a text or a label is returned with an empty one.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_unified.data.sources.lines import json_rows
from lightning_unified.models.classifier.data.labelled import LabelledText
from lightning_unified.models.classifier.data.reading.decoding import decoded
from lightning_unified.models.classifier.data.reading.format import Column, FileFormat
from lightning_unified.models.classifier.data.reading.table import rows_of

__all__ = ["SUFFIXES", "read", "rows_in", "text_of"]

SUFFIXES = (".csv", ".tsv", ".jsonl")
"""Suffixes of the files that hold several texts, one a row."""

_SPLITS = {"": False, "train": False, "test": True}


def read(path: Path, form: FileFormat | None = None) -> list[LabelledText]:
    """Return the labelled texts of a file or folder; an empty cell gives an empty text or label.

    Raises:
        FileNotFoundError: If `path` does not exist, or is a folder without a text in a class.
        ValueError: If a file has another suffix or encoding, lacks a column, or has an invalid row; with file and line.
    """
    given = form or FileFormat()
    if not path.exists():
        raise FileNotFoundError(
            f"{given.settings.path}{path} does not exist; give a .csv, .tsv or .jsonl file, or a folder of classes."
        )
    if path.is_dir():
        return _folder(path, given)
    texts = [_labelled(row, given, where=where) for where, row in rows_in(path, given)]
    if not texts:
        raise ValueError(f"{path} has no rows; give some.")
    return texts


def rows_in(path: Path, given: FileFormat) -> Iterator[tuple[str, Mapping[Column, Any]]]:
    """Yield place and columns of each row of a table or of JSON lines.

    Raises:
        ValueError: As `read`.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} is none of {', '.join(SUFFIXES)}; convert it to one of them.")
    content = decoded(path, encoding=given.encoding, key=given.settings.encoding)
    if suffix == ".jsonl":
        return _records(content, given, source=str(path))
    return rows_of(content, source=str(path), given=given)


def _folder(path: Path, given: FileFormat) -> list[LabelledText]:
    names = {child.name for child in path.iterdir() if child.is_dir()}
    sides = {path / "train": False, path / "test": True} if names == {"train", "test"} else {path: False}
    texts = [
        LabelledText(
            text=decoded(file, encoding=given.encoding, key=given.settings.encoding),
            label=file.parent.name,
            is_test=is_test,
        )
        for side, is_test in sides.items()
        for file in sorted(side.glob("*/*.txt"))
    ]
    if not texts:
        tables = sorted(file.name for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        ways = f"give one of its files: {', '.join(tables[:5])}; or " if tables else ""
        raise FileNotFoundError(
            f"the folder {path} holds no class/*.txt; {ways}make a subfolder of .txt files for each class."
        )
    return texts


def _records(content: str, given: FileFormat, *, source: str) -> Iterator[tuple[str, dict[Column, Any]]]:
    """Yield place and object of each line that is not blank, once every column is there."""
    keys = (given.settings.text, given.settings.label)
    for where, row in json_rows(content, source=source):
        for column, key in zip(given.columns, keys, strict=False):
            if column not in row:
                raise ValueError(
                    f"{where}: no {column}; its keys are {', '.join(row) or '(none)'}: name the one to read by {key}…"
                )
        yield where, {**row}


def _labelled(row: Mapping[Any, Any], given: FileFormat, *, where: str) -> LabelledText:
    assert given.label is not None
    text, label = text_of(row[given.text], where=where, column=given.text), row[given.label]
    label = _class(label)
    if label is None:
        raise ValueError(f"{where}: {given.label}={row[given.label]!r}; it must be the name or the number of a class.")
    split = str(row.get("split") or "").strip().lower()
    if split not in _SPLITS:
        raise ValueError(f"{where}: split={split!r}; it must be train or test, or left out.")
    return LabelledText(text=text, label=label, group=str(row.get("group") or ""), is_test=_SPLITS[split])


def _class(value: Any) -> str | None:
    """Return a class name: empty for null and NaN, None for a value that is no name."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).strip() if isinstance(value, str | int) else None


def text_of(value: Any, *, where: str, column: Column) -> str:
    """Return the text in a row's column; an empty one for null.

    Raises:
        ValueError: If it is no text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column}={value!r}; it must be a text.")  # noqa: TRY004 - of a file, whatever its type
    return value
