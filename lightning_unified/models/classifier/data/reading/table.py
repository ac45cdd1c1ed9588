"""Rows of a delimited table, with columns by name or number.

The reader finds the delimiter and refuses each malformed row by its line number. The delimiter is the one of comma, semicolon, tab
and vertical bar under which the first line names the columns. Of a table without names, it is the one that gives the first rows
equally many fields.
"""

import csv
import difflib
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_unified.models.classifier.data.reading.format import Column, FileFormat

__all__ = ["Row", "rows_of"]

Row = tuple[str, list[str]]
"""Place of a row (`file:line`), and the fields of the columns that were asked for."""

_DELIMITERS = (",", ";", "\t", "|")
_OPTIONAL = ("group", "split")
_SAMPLE = 50  # rows that decide the delimiter of a table without names
_SHOWN = 8  # columns in a message


def rows_of(content: str, *, source: str, given: FileFormat) -> Iterator[tuple[str, dict[Column, str]]]:
    """Yield place and fields of each row of a table.

    A field is named after its column; `group` and `split` keep these names.

    Raises:
        ValueError: If a column is missing, or a row has a stray quote or another number of fields than the first.
    """
    with _long_fields():
        declared = content.startswith("sep=") and content[5:6] == "\n"  # Excel's line that names the delimiter
        skipped = 1 if declared else 0
        body = content.partition("\n")[2] if declared else content
        named = isinstance(given.text, str)
        delimiter = content[4] if declared else _delimiter(body, given.columns)
        records = _records(body, delimiter, source=source, skipped=skipped)
        _, first = next(records, ("", []))
        if not first:
            raise ValueError(f"{source} is empty; its first line must name the columns.")
        names = [name.strip() for name in first]
        places = _by_name(names, source, given) if named else _by_number(names, source, given)
        rest = records if named else itertools.chain([(f"{source}:{skipped + 1}", first)], records)
        for where, fields in rest:
            _check_fields(fields, names, places, where=where, delimiter=delimiter)
            yield where, {column: fields[place] for column, place in places.items() if place < len(fields)}


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the csv module's limit of a field's length, which holds for the whole process."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _records(content: str, delimiter: str, *, source: str, skipped: int) -> Iterator[tuple[str, list[str]]]:
    """Yield place and fields of every record that is not blank."""
    reader = csv.reader(io.StringIO(content), delimiter=delimiter, strict=True)
    while True:
        where = f"{source}:{reader.line_num + 1 + skipped}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{where}: a field begins with a quote and does not end with one ({error}); close it, and write two quotes for one "
                "within a field."
            ) from error
        if fields is None:
            return
        if any(field.strip() for field in fields):
            yield where, fields


def _delimiter(content: str, columns: Sequence[Column]) -> str:
    firsts = {delimiter: _sample(content, delimiter) for delimiter in _DELIMITERS}
    widths = {delimiter: len(rows[0]) if rows else 0 for delimiter, rows in firsts.items()}
    if isinstance(columns[0], str):
        fitting = [d for d, rows in firsts.items() if rows and set(columns) <= {name.strip() for name in rows[0]}]
    else:
        fitting = [d for d, rows in firsts.items() if widths[d] > 1 and len({len(row) for row in rows}) == 1]
    # by name the first that fits, by number the one with most fields; none that fits: the widest, for the message
    if fitting and isinstance(columns[0], str):
        return fitting[0]
    return max(fitting or _DELIMITERS, key=lambda delimiter: widths[delimiter])


def _sample(content: str, delimiter: str) -> list[list[str]]:
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(content), delimiter=delimiter, strict=True):
            if row:
                rows.append(row)
            if len(rows) == _SAMPLE:
                break
    except csv.Error:
        pass  # reading the rows reports it, under the delimiter that is chosen
    return rows


def _by_name(names: list[str], source: str, given: FileFormat) -> dict[Column, int]:
    """Return the place of each column that the first line names."""
    missing = {
        str(column): key for column, key in zip(given.columns, _keys(given), strict=False) if column not in names
    }
    if missing:
        raise ValueError(
            f"{source} has the columns {_listed(names)} and no {' and no '.join(missing)}; name the column, as in "
            f"{' '.join(_proposed(missing, names, taken=set(given.columns)))}. Numbers from 0 name the columns of a table without a line of "
            "names."
        )
    for column in given.columns:
        if names.count(str(column)) > 1:
            raise ValueError(f"{source} has the column {column} {names.count(str(column))} times; rename all but one.")
    return {name: names.index(str(name)) for name in (*given.columns, *(one for one in _OPTIONAL if one in names))}


def _keys(given: FileFormat) -> tuple[str, str]:
    """Return how a user sets each of a format's columns."""
    return given.settings.text, given.settings.label


def _proposed(missing: dict[str, str], names: list[str], *, taken: set[Column]) -> Iterator[str]:
    """Yield a setting for each missing column: its most similar name, else the first free one."""
    free = [name for name in names if name and name not in taken]
    for column, key in missing.items():
        near = difflib.get_close_matches(column.lower(), [name.lower() for name in free], n=1)
        found = next((name for name in free if name.lower() in near), free[0] if free else "NAME")
        free = [name for name in free if name != found]
        yield f"{key}{found}"


def _by_number(names: list[str], source: str, given: FileFormat) -> dict[Column, int]:
    """Return the place of each column of a table without names."""
    for column, key in zip(given.columns, _keys(given), strict=False):
        if int(column) >= len(names):
            raise ValueError(
                f"{key}{column}: {source} has {len(names)} columns, numbered from 0; its first line is {_listed(names)}."
            )
    return {column: int(column) for column in given.columns}


def _check_fields(
    fields: list[str], names: list[str], places: dict[Column, int], *, where: str, delimiter: str
) -> None:
    kind = "a tab" if delimiter == "\t" else repr(delimiter)
    if any(field.strip() for field in fields[len(names) :]):
        raise ValueError(
            f"{where}: the row has {len(fields)} fields and the first line {len(names)}; put a field that contains {kind} within quotes."
        )
    missing = [column for column, place in places.items() if place >= len(fields) and column not in _OPTIONAL]
    if missing:
        raise ValueError(
            f"{where}: the row has {len(fields)} of {len(names)} fields and no {missing[0]}; fields are separated by {kind}."
        )


def _listed(names: list[str]) -> str:
    shown = [name if len(name) <= 24 else f"{name[:23]}…" for name in names[:_SHOWN]]
    return ", ".join(name or "(unnamed)" for name in shown) + (" …" if len(names) > _SHOWN else "")
