"""A plan on a terminal, with bars of block characters."""

import io
import math
import shutil
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.page import sheet_of
from lightning_unified.cost_model.render.sheet import Bars, Fact, Sheet, Table

__all__ = ["to_terminal", "to_text"]

_COLUMNS = 120  # of a text that no terminal shows
_WIDTH = 32  # cells of the widest bar
_FULL, _EIGHTHS, _MARK = "█", " ▏▎▍▌▋▊▉", "┊"


def to_terminal(sheet: Sheet) -> RenderableType:
    """Return a page for a terminal of 100 columns or more; narrower ones fold texts."""
    return Group(*_parts(sheet))


def to_text(planned: Plan | Prediction) -> str:
    """Return the page as plain text, as wide as the terminal."""
    width = shutil.get_terminal_size((_COLUMNS, 0)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as page:
        console.print(to_terminal(sheet_of(planned, title=type(planned).__name__)))
    return "\n".join(line.rstrip() for line in page.get().splitlines())


def _parts(sheet: Sheet) -> Iterator[RenderableType]:
    yield Text(sheet.title, style="bold")
    yield _facts(sheet.facts)
    for table in sheet.tables:
        yield Text()
        yield _table(table)
        if table.remark:
            yield Text(table.remark, style="dim")
    if sheet.notes:
        yield Text()
        yield Text("Notes", style="bold")
        yield from (Text(f"· {note}") for note in sheet.notes)


def _facts(facts: Sequence[Fact]) -> Grid:
    grid = Grid(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for fact in facts:
        words = Text(fact.text, style="bold red" if fact.name == "verdict" else "")
        if fact.why:
            words.append(f"  {fact.why}", style="dim")
        grid.add_row(fact.name, words)
    return grid


def _table(table: Table) -> Grid:
    grid = Grid(
        title=table.title,
        title_justify="left",
        title_style="bold not italic",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for at, column in enumerate(table.columns):
        grid.add_column(column, justify="right" if at in table.numbers else "left", overflow="fold")
    if table.bars is not None:
        grid.add_column(table.bars.title, no_wrap=True)
    for at, row in enumerate(table.rows):
        style = "bold" if at in table.strong else "dim" if at in table.faint else ""
        cells = [Text(cell) for cell in row]
        grid.add_row(*cells, *([] if table.bars is None else [_bar(table.bars, at)]), style=style)
    return grid


def _bar(bars: Bars, at: int) -> Text:
    """Return one bar; marks show where the bar does not cover them."""
    start, end = (share * _WIDTH for share in bars.spans[at])
    marks = {min(int(mark * _WIDTH), _WIDTH - 1) for mark in bars.marks}
    cells = []
    for cell in range(_WIDTH):
        filled = min(end, cell + 1) - max(start, cell)
        eighths = 0 if filled <= 0 else max(1, math.floor(8 * filled))
        begins_inside = start > cell and eighths
        block = _FULL if eighths == 8 or begins_inside else _EIGHTHS[eighths] if eighths else ""
        cells.append(block or (_MARK if cell in marks else " "))
    return Text("".join(cells).rstrip())
