"""The HTML page of a report: its sections in order, self-contained in one file."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from lightning_unified.cli.report.html.bars import instant_bars, peak_bars
from lightning_unified.cli.report.html.charts import (
    across,
    course_plots,
    loss_plots,
    memory_plots,
    other_plots,
    speed_plots,
)
from lightning_unified.cli.report.html.svg import Plot, draw
from lightning_unified.cli.report.html.sweep import varied_section
from lightning_unified.cli.report.html.tables import (
    alternatives_table,
    chip,
    environment,
    facts,
    moments_table,
    reasons_table,
    table,
    text_of,
    unknown,
)
from lightning_unified.cli.report.run_directory.configuration import differences, flat
from lightning_unified.cli.report.run_directory.figures import at, prediction
from lightning_unified.cli.report.run_directory.records import Run

__all__ = ["page"]


def page(runs: Sequence[Run]) -> str:
    """Return one HTML page about `runs`.

    It needs no network: style, script and charts are embedded.
    """
    own = files(__package__ or "lightning_unified.cli.report.html")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = {
        "{{title}}": escape(title),
        "{{style}}": (own / "page.css").read_text(encoding="utf-8"),
        "{{script}}": (own / "page.js").read_text(encoding="utf-8"),
        "{{head}}": _head(runs, title),
        "{{body}}": "".join(_sections(runs)),
    }
    text = (own / "page.html").read_text(encoding="utf-8")
    pieces = []
    while text:
        # Replace one place at a time, so that text of a run is never taken for a place of the template.
        place = min((name for name in parts if name in text), key=text.index, default=None)
        if place is None:
            pieces.append(text)
            break
        before, _, text = text.partition(place)
        pieces += [before, parts[place]]
    return "".join(pieces)


def _head(runs: Sequence[Run], title: str) -> str:
    lines = "".join(
        f'<li>{_chip(index, run, alone=len(runs) == 1)}<span class="{_mood(run)}">{escape(run.status)}</span> <code>{escape(str(run.directory))}</code></li>'
        for index, run in enumerate(runs)
    )
    return f'<h1>{escape(title)}</h1><ul class="runs">{lines}</ul>'


def _chip(index: int, run: Run, *, alone: bool = False) -> str:
    return "" if alone else f"{chip(index, run)} "


def _mood(run: Run) -> str:
    return {True: "good", False: "bad", None: "warn"}[run.well]


def _sections(runs: Sequence[Run]) -> Iterable[str]:
    yield _section("Summary", _summary(runs))
    varied = varied_section(runs) if len(runs) > 1 else ""
    if varied:
        yield _section("Varied settings", varied)
    yield _section("Memory", _legend_of(runs) + _charts(memory_plots(runs), runs))
    yield _section("Predicted and measured peak", "".join(_peaks(runs)))
    yield _section("Micro-batch and recoveries", _legend_of(runs) + _charts(course_plots(runs), runs))
    yield _section("Losses", _legend_of(runs) + _charts(loss_plots(runs), runs))
    yield _section("Speed", _legend_of(runs) + _charts(speed_plots(runs), runs))
    if any(run.samples for run in runs):
        yield _section("Samples", _each(runs, _samples))
    yield _section("The plan and its reasons", _each(runs, lambda run: reasons_table(run) + alternatives_table(run)))
    yield _section("Events", _each(runs, moments_table))
    if len(runs) > 1:
        yield _section(
            "Memory of each run", _each(runs, lambda run: _charts(memory_plots([run]), [run], among=len(runs)))
        )
    others = other_plots(runs)
    if others:
        yield _section("Other metrics", _folded(f"{len(others)} charts", _legend_of(runs) + _charts(others, runs)))
    yield _section("Configuration", _configuration(runs))
    yield _section("Environment", _compared(runs, [environment(run) for run in runs]))
    problems = [f"{escape(run.name)}: {escape(problem)}" for run in runs for problem in run.problems]
    if problems:
        yield _section("Files that cannot be read", f"<ul>{''.join(f'<li>{each}</li>' for each in problems)}</ul>")


def _samples(run: Run) -> str:
    return f"<pre>{escape(run.samples)}</pre>" if run.samples else unknown(f"{run.name} has no samples.txt")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _charts(plots: Sequence[Plot], runs: Sequence[Run], *, among: int = 0) -> str:
    """Return the charts of `runs`.

    More runs on a page mean fewer points per curve, so that the page stays small.
    """
    among = among or len(runs)
    steps, most = across(runs), max(60, min(500, 1500 // among))
    drawn = "".join(draw(replace(plot, across=steps, points=most)) for plot in plots)
    return f'<div class="charts of-{min(len(plots), 2)}">{drawn}</div>'


def _legend_of(runs: Sequence[Run]) -> str:
    """Return the runs with their colors, shown above charts of several runs."""
    return (
        "" if len(runs) == 1 else f'<p class="whose">{"".join(_chip(index, run) for index, run in enumerate(runs))}</p>'
    )


def _each(runs: Sequence[Run], content: Callable[[Run], str]) -> str:
    if len(runs) == 1:
        return content(runs[0])
    return "".join(
        f"<details{' open' if len(runs) <= 3 else ''}><summary>{_chip(index, run)}</summary>{content(run)}</details>"
        for index, run in enumerate(runs)
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _summary(runs: Sequence[Run]) -> str:
    found = [facts(run) for run in runs]
    if len(runs) > 1:
        return _compared(runs, found)
    tiles = "".join(
        f'<div class="tile{" unknown" if text == "unknown" else ""}"><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>'
        for name, text in found[0].items()
    )
    given = " ".join(runs[0].overrides)
    return f'<dl class="tiles">{tiles}</dl>' + (
        f'<p class="note">given: <code>{escape(given)}</code></p>' if given else ""
    )


def _compared(runs: Sequence[Run], found: Sequence[dict[str, str]]) -> str:
    """Return a table with a column for each run; figures that differ are bold."""
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = []
    for name in names:
        texts = [each.get(name, "unknown") for each in found]
        differ = len(set(texts)) > 1
        rows.append([escape(name), *(f"<b>{escape(text)}</b>" if differ else escape(text) for text in texts)])
    head = ["", *(_chip(index, run) for index, run in enumerate(runs))] if len(runs) > 1 else []
    return table(head, rows, kind="compared")


def _peaks(runs: Sequence[Run]) -> Iterable[str]:
    yield peak_bars(runs)
    for index, run in enumerate(runs):
        said = prediction(run)
        if said:
            notes = at(said, "notes")
            words = [
                f"{key}: {said[name]}"
                for name, key in (("confidence", "confidence"), ("instant", "the peak is in"))
                if said.get(name)
            ]
            words += [str(note) for note in notes] if isinstance(notes, (list, tuple)) else []
            yield f'<p class="note">{_chip(index, run, alone=len(runs) == 1)}{escape("; ".join(words))}</p>'
            yield instant_bars(run)


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    if len(runs) > 1:
        differing = differences(runs)
        rows = [
            [f"<code>{escape(key)}</code>", *(escape(text_of(value)) if has else "not set" for has, value in values)]
            for key, values in differing.items()
        ]
        head = ["", *(_chip(index, run) for index, run in enumerate(runs))]
        parts.append(table(head, rows, kind="compared") if rows else "<p>The runs are configured alike.</p>")
    for run in runs:
        keys = flat(run)
        rows = [(f"<code>{escape(key)}</code>", escape(text_of(value))) for key, value in keys.items()]
        title = f"all {len(keys)} keys" if len(runs) == 1 else f"all {len(keys)} keys of {run.name}"
        parts.append(_folded(title, table((), rows)) if keys else unknown(f"{run.name} has no config.yaml"))
    return "".join(parts)
