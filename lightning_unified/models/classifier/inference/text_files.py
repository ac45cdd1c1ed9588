"""Read texts to classify from files and standard input."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_unified.models.classifier.data.reading.decoding import decoded
from lightning_unified.models.classifier.data.reading.format import FileFormat
from lightning_unified.models.classifier.data.reading.label_files import SUFFIXES, rows_in, text_of

__all__ = ["Given", "read_texts"]

Given = tuple[str, str]  # place of origin, text


def read_texts(sources: Sequence[str], *, form: FileFormat, lines: bool = False) -> list[Given]:
    """Return the texts of `sources`, each with its origin; a blank table cell is a blank text.

    Tables and JSON lines are read as in training, a text in each row. Any other file is one text, or one text for each line with
    `lines`, without empty lines. A folder stands for the `.txt` files below it. `-` is standard input, one text for each line.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is not a text in its encoding, lacks the column, or there is no text at all.
    """
    found: list[Given] = []
    for source in sources:
        if source == "-":
            found += _lines(sys.stdin.read(), "-")
            continue
        for file in _files(Path(source)):
            if file.suffix.lower() in SUFFIXES:
                rows = rows_in(file, form)
                found += [(where, text_of(row[form.text], where=where, column=form.text)) for where, row in rows]
                continue
            text = decoded(file, encoding=form.encoding, key=form.settings.encoding)
            found += _lines(text, str(file)) if lines else [(str(file), text)]
    if not any(text.strip() for _, text in found):
        raise ValueError(f"there is no text in {', '.join(sources)}; give a file with at least one.")
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.rglob("*.txt"))
    elif path.is_file():
        yield path
    else:
        raise FileNotFoundError(f"there is no file {path}; give a text file, or - for standard input.")


def _lines(text: str, source: str) -> list[Given]:
    return [(f"{source}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
