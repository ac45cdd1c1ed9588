"""The page about a plan, independent of its output format: facts, tables, notes."""

from dataclasses import dataclass

__all__ = ["Bars", "Fact", "Sheet", "Table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line: a decision or finding, and its reason, which may be empty."""

    name: str
    text: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A bar for each row of a table.

    Attributes:
        spans: Start and end of each bar, in 0..1 of the scale.
        marks: Places on the scale to mark, such as the budget.
        title: Meaning of the whole scale.
    """

    spans: tuple[tuple[float, float], ...]
    marks: tuple[float, ...] = ()
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a title.

    Attributes:
        title: Title above the table.
        columns: Column heads.
        rows: Cells as text.
        numbers: Columns of numbers, which are right-aligned.
        strong: Emphasised rows.
        faint: Rows for comparison only.
        bars: Bars, for formats that can draw them.
        remark: One line below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    strong: frozenset[int] = frozenset()
    faint: frozenset[int] = frozenset()
    bars: Bars | None = None
    remark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """The whole page, in reading order."""

    title: str
    facts: tuple[Fact, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
