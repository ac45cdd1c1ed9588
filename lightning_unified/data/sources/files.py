"""A user's own documents: a `.jsonl` file, a `.txt` file, or a folder of both.

- `.jsonl`: one object a line: a record (`equipment`, `symptom`, `error_codes`, `probable_cause`, `solution`) or
  `{"text": ...}`; either may name its `group`.
- `.txt` that starts with one of the labels Problem, Equipment, Error Codes, Cause, Solution: blocks of such lines, separated by
  lines of `---`; a line without a label continues the line before.
- any other `.txt`: plain text, separated by lines of `---` if there are any.

Groups: in a folder of several files, the file. In a single file, records with the same symptom; pieces of a plain text. A
row's own `group` takes precedence.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_unified.data.documents.document import Document
from lightning_unified.data.documents.record import Record, render
from lightning_unified.data.sources.lines import json_rows, read_utf8

__all__ = ["pieces", "read"]

_FIELDS = ("equipment", "symptom", "error_codes", "probable_cause", "solution", "diagnostic_steps", "group")
_LABELS = {
    "problem": "symptom",
    "equipment": "equipment",
    "error codes": "error_codes",
    "error code": "error_codes",
    "cause": "probable_cause",
    "solution": "solution",
}
_LABEL = re.compile(r"(problem|equipment|error codes?|cause|solution)\s*:\s*(.*)", re.IGNORECASE)
_RULE = re.compile(r"-{3,}")
_PIECES = 20  # groups into which a single plain text is divided, at blank lines


def read(path: Path) -> list[Document]:
    """Return the documents of a file or folder.

    Raises:
        FileNotFoundError: If `path` does not exist, or is a folder without `.jsonl` or `.txt` files.
        ValueError: If a file has another suffix, is empty, is not UTF-8, or has an invalid row; with file and line.
    """
    if not path.exists():
        raise FileNotFoundError(f"data.path={path} does not exist; give a .jsonl or .txt file, or a folder of them.")
    found = sorted(file for file in path.rglob("*") if file.suffix in _READERS) if path.is_dir() else [path]
    if not found:
        raise FileNotFoundError(f"the folder {path} holds no .jsonl or .txt file.")
    documents = []
    for file in found:
        group = file.relative_to(path).as_posix() if len(found) > 1 else ""
        documents.extend(_read_file(file, group=group))
    return documents


def _read_file(file: Path, *, group: str) -> list[Document]:
    if file.suffix not in _READERS:
        raise ValueError(f"{file} is neither .jsonl nor .txt; convert it to one of them.")
    documents = list(_READERS[file.suffix](file, read_utf8(file)))
    if not documents:
        raise ValueError(f"{file} is empty; remove it or fill it.")
    if group:
        return [replace(document, group=document.group or group) for document in documents]
    texts = [document for document in documents if document.record is None]
    if len(texts) == 1:
        documents = [piece for document in documents for piece in (pieces(document) if document.text else [document])]
    return [_with_own_group(document, number) for number, document in enumerate(documents)]


def _with_own_group(document: Document, number: int) -> Document:
    if document.group:
        return document
    own = f"text {number}" if document.record is None else " ".join(document.record.symptom.lower().split())
    return replace(document, group=own)


def _jsonl(file: Path, text: str) -> Iterator[Document]:
    for where, row in json_rows(text, source=file):
        group = row.get("group", "")
        if not isinstance(group, str):
            raise ValueError(f"{where}: group is {group!r}; it must be text.")  # noqa: TRY004 - a wrong value in a file
        if "text" in row:
            yield _text_row(row, where=where, group=group)
        else:
            yield Document(group=group, record=_record(row, where=where))


def _text_row(row: dict[str, Any], *, where: str, group: str) -> Document:
    if extra := set(row) - {"text", "group"}:
        raise ValueError(f"{where}: a row with text has no other field than group; remove {', '.join(sorted(extra))}.")
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise ValueError(f"{where}: text is {row['text']!r}; it must be a text that is not blank.")
    return Document(group=group, text=row["text"].strip())


def _record(row: dict[str, Any], *, where: str) -> Record:
    for name in row:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it, or give text alone."
            raise ValueError(f"{where}: unknown field {name!r}; the fields are {', '.join(_FIELDS)}; {hint}")
    try:
        record = Record.from_mapping(row)
        render(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not record.probable_cause.strip():
        raise ValueError(f"{where}: probable_cause is missing or blank; without it there is nothing to learn.")
    return record


def _txt(file: Path, text: str) -> Iterator[Document]:
    opening = next((line.strip() for line in text.splitlines() if line.strip()), "")
    for number, lines in _blocks(text):
        if _LABEL.match(opening):
            row = _block_row(lines, file=file, number=number)
            yield Document(group="", record=_record(row, where=f"{file}:{number}"))
        else:
            yield Document(group="", text="\n".join(lines).strip())


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the lines of each block between rules.

    Blank blocks are left out.
    """
    first, lines = 1, []
    for number, line in enumerate([*text.splitlines(), "---"], start=1):
        if not _RULE.fullmatch(line.strip()):
            lines.append(line.rstrip())
            continue
        blank = next((place for place, content in enumerate(lines) if content), len(lines))
        if blank < len(lines):
            yield first + blank, lines[blank:]
        first, lines = number + 1, []


def _block_row(lines: list[str], *, file: Path, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    field = ""
    for line_number, line in enumerate(lines, start=number):
        if match := _LABEL.match(line.strip()):
            field = _LABELS[match.group(1).lower()]
            if field in row:
                raise ValueError(
                    f"{file}:{line_number}: {match.group(1)} occurs twice in one block; separate blocks by ---."
                )
            row[field] = match.group(2)
        elif line.strip() and not field:
            labels = "Problem, Equipment, Error Codes, Cause, Solution"
            raise ValueError(
                f"{file}:{line_number}: a block begins with one of {labels} and a colon, not with {line!r}."
            )
        elif line.strip():
            row[field] = f"{row[field]} {line.strip()}".strip()
    if row.get("error_codes", "").strip().lower() in {"none", "-", "n/a"}:
        row["error_codes"] = ""
    return row


def pieces(document: Document) -> Iterator[Document]:
    """Divide a text into consecutive pieces of similar length.

    Pieces end at blank lines, or else at line ends.
    """
    parts = [part for part in re.split(r"\n[ \t]*\n", document.text) if part.strip()]
    joint = "\n\n"
    if len(parts) < 2:
        parts, joint = [line for line in document.text.splitlines() if line.strip()], "\n"
    target = sum(map(len, parts)) / _PIECES
    piece: list[str] = []
    for part in parts:
        piece.append(part)
        if sum(map(len, piece)) >= target:
            yield replace(document, text=joint.join(piece))
            piece = []
    if piece:
        yield replace(document, text=joint.join(piece))


_READERS = {".jsonl": _jsonl, ".txt": _txt}
