"""A plan as Markdown, for an issue, a pull request or notes."""

from collections.abc import Iterator, Sequence

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.page import sheet_of
from lightning_unified.cost_model.render.planned import MachinePlan
from lightning_unified.cost_model.render.sheet import Sheet, Table
from lightning_unified.hardware.environment.watermarks import Watermarks

__all__ = ["to_markdown"]


def to_markdown(
    planned: Plan | Prediction,
    *,
    title: str = "Plan",
    facts: Sequence[tuple[str, str]] = (),
    watermarks: Watermarks | None = None,
    machines: Sequence[MachinePlan] = (),
    more: Sequence[Table] = (),
) -> str:
    """Return a plan or a prediction as GitHub-flavoured Markdown.

    The arguments are those of `to_terminal`.
    """
    sheet = sheet_of(planned, title=title, facts=facts, watermarks=watermarks, machines=machines, more=more)
    return "\n".join(_lines(sheet)) + "\n"


def _lines(sheet: Sheet) -> Iterator[str]:
    yield f"# {_plain(sheet.title)}"
    yield ""
    for fact in sheet.facts:
        why = f" ({_plain(fact.why)})" if fact.why else ""
        yield f"- **{fact.name}**: {_plain(fact.text)}{why}"
    for table in sheet.tables:
        yield from ("", f"## {table.title}", "")
        yield from _table(table)
        yield from ("", _plain(table.remark)) if table.remark else ()
    if sheet.notes:
        yield from ("", "## Notes", "")
        yield from (f"- {_plain(note)}" for note in sheet.notes)


def _table(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(_plain(column) for column in table.columns)} |"
    yield f"| {' | '.join('---:' if at in table.numbers else '---' for at in range(len(table.columns)))} |"
    for at, row in enumerate(table.rows):
        cells = [f"**{_plain(cell)}**" if cell and at in table.strong else _plain(cell) for cell in row]
        yield f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escape `text` for Markdown.

    Names of operations hold underscores, stars, bars and angle brackets.
    """
    for sign in ("\\", "|", "*", "_", "<", ">", "`"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
