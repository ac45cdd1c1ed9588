"""One page about a plan, before it is known where it will be shown: facts in words, tables, notes."""

from dataclasses import dataclass

__all__ = ["Bars", "Fact", "Sheet", "Table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One line: what was chosen or found, and why; `why` may be empty."""

    name: str
    text: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A bar for each row of a table.

    Attributes:
        spans: Where each bar begins and ends, in 0..1 of the scale.
        marks: Places on the scale that are to be seen, such as the budget.
        title: What the whole scale is.
    """

    spans: tuple[tuple[float, float], ...]
    marks: tuple[float, ...] = ()
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a title.

    Attributes:
        title: Above it.
        columns: Their heads.
        rows: Cells as text.
        numbers: Which columns hold numbers, and stand to the right.
        strong: Rows to be seen first.
        faint: Rows that are there for comparison only.
        bars: Drawn where a bar can be drawn.
        remark: One line below.
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
    """The whole page, in the order in which it is read."""

    title: str
    facts: tuple[Fact, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
