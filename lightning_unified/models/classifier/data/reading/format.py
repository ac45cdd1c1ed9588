"""Format of a user's labelled files: columns, encoding, and the names of these settings."""

import codecs
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Column", "FileFormat", "Settings"]

Column = str | int
"""A column: its name in the first line, or its number from 0 in a table without names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The way a user writes the settings of a format: run overrides or command flags.

    Messages use it.
    """

    path: str = "data.path="
    text: str = "data.text_column="
    label: str = "data.label_column="
    encoding: str = "data.encoding="


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFormat:
    """Columns and encoding of labelled files.

    Args:
        text: The column, or the key of JSON lines, of the text.
        label: That of the class; None where only texts are read.
        encoding: Name of the encoding, as Python knows it. A byte-order mark takes precedence.
        settings: How a user writes these settings, for messages.

    Raises:
        ValueError: If a column is invalid, both columns are one, or the encoding is unknown.
    """

    text: Column = "text"
    label: Column | None = "label"
    encoding: str = "utf-8"
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for key, column in ((self.settings.text, self.text), (self.settings.label, self.label)):
            if column is not None and not _is_column(column):
                raise ValueError(f"{key}{column}; give a column's name, or its number from 0 in a table without names.")
        if self.label is not None and type(self.text) is not type(self.label):
            raise ValueError(
                f"{self.settings.text}{self.text} and {self.settings.label}{self.label} mix a name and a number; give both names, or "
                "both numbers for a table without a line of names."
            )
        if self.text == self.label:
            raise ValueError(
                f"{self.settings.text}{self.text} and {self.settings.label}{self.label} are one column; give two."
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise ValueError(
                f"{self.settings.encoding}{self.encoding} is no encoding that Python knows; give one, as in utf-8, cp1252 or latin-1."
            ) from error

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns to read: text, and label if it is read."""
        return (self.text,) if self.label is None else (self.text, self.label)

    def state(self) -> dict[str, Any]:
        """Return columns and encoding as plain data, for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}


def _is_column(column: Any) -> bool:
    if isinstance(column, int):
        return not isinstance(column, bool) and column >= 0
    return isinstance(column, str) and bool(column.strip())
