"""A plan as Markdown, for an issue, a pull request or notes."""

from collections.abc import Iterator

from lightning_unified.cost_model.render.sheet import Sheet, Table

__all__ = ["to_markdown"]


def to_markdown(sheet: Sheet) -> str:
    """Return a page as GitHub-flavoured Markdown."""
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
