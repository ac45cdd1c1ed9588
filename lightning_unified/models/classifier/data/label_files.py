"""Read labelled texts: a CSV or JSONL file, or a folder with a subfolder per class.

- `.csv`, `.tsv`: a first line that names the columns `text` and `label`, in any order.
- `.jsonl`: one object a line with `text` and `label`.
- a folder: a subfolder for each class with a `.txt` file for each text; or subfolders `train` and `test` of such.

Rows may also have a `group`, which a split keeps together, and a `split`, `train` or `test`, which then is the split. Other columns
are ignored.
"""

import csv
import difflib
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_unified.data.sources.lines import json_rows, read_utf8
from lightning_unified.models.classifier.data.labelled import LabelledText

__all__ = ["read"]

_NEEDED = ("text", "label")
_SPLITS = {"": False, "train": False, "test": True}


def read(path: Path) -> list[LabelledText]:
    """Return the labelled texts of a file or folder.

    Raises:
        FileNotFoundError: If `path` does not exist, or is a folder without a text in a class.
        ValueError: If a file has another suffix, is not UTF-8, or has an invalid row; with file and line.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"data.path={path} does not exist; give a .csv, .tsv or .jsonl file, or a folder of classes."
        )
    if path.is_dir():
        return _folder(path)
    if path.suffix not in _READERS:
        raise ValueError(f"{path} is none of {', '.join(_READERS)}; convert it to one of them.")
    texts = list(_READERS[path.suffix](path))
    if not texts:
        raise ValueError(f"{path} has no rows; give some.")
    return texts


def _folder(path: Path) -> list[LabelledText]:
    names = {child.name for child in path.iterdir() if child.is_dir()}
    sides = {path / "train": False, path / "test": True} if names == {"train", "test"} else {path: False}
    texts = [
        LabelledText(text=read_utf8(file), label=file.parent.name, is_test=is_test)
        for side, is_test in sides.items()
        for file in sorted(side.glob("*/*.txt"))
    ]
    if not texts:
        raise FileNotFoundError(
            f"the folder {path} holds no class/*.txt; make a subfolder of .txt files for each class."
        )
    return texts


def _table(file: Path) -> Iterator[LabelledText]:
    # a text may exceed the csv module's field limit, which holds for the whole process and is restored
    before = csv.field_size_limit(2**31 - 1)
    try:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        reader = csv.DictReader(io.StringIO(read_utf8(file)), delimiter=delimiter)
        _check_columns(file, reader.fieldnames or ())
        for row in reader:
            yield _labelled(row, where=f"{file}:{reader.line_num}")
    except csv.Error as error:
        raise ValueError(
            f"{file}: {error}; write fields that hold a delimiter or a line's end within quotes."
        ) from error
    finally:
        csv.field_size_limit(before)


def _check_columns(file: Path, names: Iterable[str]) -> None:
    for needed in _NEEDED:
        if needed not in names:
            near = difflib.get_close_matches(needed, names, n=1)
            raise ValueError(
                f"{file} has the columns {', '.join(names) or '(none)'} and no {needed}; its first line must name text and label"
                + (f": rename {near[0]}." if near else ".")
            )


def _jsonl(file: Path) -> Iterator[LabelledText]:
    return (_labelled(row, where=where) for where, row in json_rows(read_utf8(file), source=file))


def _labelled(row: Mapping[str, Any], *, where: str) -> LabelledText:
    text, label = row.get("text"), row.get("label")
    if not isinstance(text, str):
        raise ValueError(f"{where}: text={text!r}; a row needs a text.")  # noqa: TRY004 - of a file, whatever its type
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"{where}: label={label!r}; it must be the name or the number of a class.")
    split = str(row.get("split") or "")
    if split not in _SPLITS:
        raise ValueError(f"{where}: split={split!r}; it must be train or test, or left out.")
    return LabelledText(text=text, label=str(label).strip(), group=str(row.get("group") or ""), is_test=_SPLITS[split])


_READERS = {".csv": _table, ".tsv": _table, ".jsonl": _jsonl}
