"""The results of a sweep: runs from best to worst, and charts of the varied numbers.

A chart shows the validation loss over a varied number.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from lightning_unified.cli.report.html.scale import amount, labels, ticks
from lightning_unified.cli.report.html.tables import chip, table, text_of
from lightning_unified.cli.report.run_directory.configuration import flat
from lightning_unified.cli.report.run_directory.figures import at, number, validation_loss
from lightning_unified.cli.report.run_directory.records import Run

__all__ = ["varied_section"]

_MOST_FIGURES = 8
_SIDE = 1000  # of the square that is stretched into the chart's frame
_WIDE = 10  # a range of this ratio or more gets a logarithmic axis


def varied_section(runs: Sequence[Run]) -> str:
    """Return a table of the runs, best first, and a chart for each varied number.

    The result is empty if nothing was varied.
    """
    given = _varied(runs)
    if not given:
        return ""
    drawn = {key: _points(values, runs) for key, values in given.items()}
    charts = [_chart(key, points) for key, points in drawn.items() if len({x for x, _, _ in points}) > 1]
    return _table(given, runs) + (
        f'<div class="charts of-{min(len(charts), 2)}">{"".join(charts)}</div>' if charts else ""
    )


def _varied(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the varied keys with each run's value.

    A value is the one of the run's command line, else of its configuration.

    The value is None where neither has such a key, as for the choice of a group.
    """
    given: list[dict[str, str]] = []
    for run in runs:
        pairs = (text.lstrip("+").partition("=") for text in run.overrides)
        given.append({key: value for key, _, value in pairs})
    keys = dict.fromkeys(key for each in given for key in each if key != "run_dir")
    found = {key: [each.get(key) for each in given] for key in keys}
    configs = [flat(run) for run in runs]
    varied = {key: values for key, values in found.items() if len(set(values)) > 1}
    return {
        key: [
            text_of(config[key]) if value is None and key in config else value
            for value, config in zip(values, configs, strict=True)
        ]
        for key, values in varied.items()
    }


def _table(given: dict[str, list[str | None]], runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in at(run.summary, "validation") or {} if name != "loss"))
    names = [name for name in names if any(number(run.summary, "validation", name) is not None for run in runs)]
    names = names[:_MOST_FIGURES]
    order = sorted(range(len(runs)), key=lambda index: _rank(runs[index]))
    rows = []
    for place, index in enumerate(order):
        run = runs[index]
        figures = [validation_loss(run), *(number(run.summary, "validation", name) for name in names)]
        cells = [escape("default" if values[index] is None else str(values[index])) for values in given.values()]
        cells += [escape(amount(figure)) for figure in figures]
        cells += [escape(amount(number(run.summary, "seconds"), "seconds")), escape(run.status)]
        best = place == 0 and math.isfinite(_rank(run))
        rows.append([chip(index, run), *(f"<b>{cell}</b>" if best else cell for cell in cells)])
    head = ["", *(f"<code>{escape(key)}</code>" for key in given), "validation loss", *map(escape, names), "took", ""]
    return table(head, rows, kind="numbers")


def _rank(run: Run) -> float:
    loss = validation_loss(run)
    return math.inf if loss is None or not math.isfinite(loss) else loss


def _points(values: Sequence[str | None], runs: Sequence[Run]) -> list[tuple[float, float, int]]:
    """Return (value, validation loss, index) of each run that has both as finite numbers."""
    points = []
    for index, (value, run) in enumerate(zip(values, runs, strict=True)):
        try:
            x = float(value or "")
        except ValueError:
            continue
        if math.isfinite(x) and math.isfinite(y := _rank(run)):
            points.append((x, y, index))
    return points


def _chart(key: str, points: Sequence[tuple[float, float, int]]) -> str:
    """Return the chart of losses over the values of `key`."""
    places = sorted({x for x, _, _ in points})
    by_factor = places[0] > 0 and places[-1] >= _WIDE * places[0]
    along = _axis([math.log(x) if by_factor else x for x in places], margin=0.08)
    losses = [y for _, y, _ in points]
    up = _axis(losses, margin=0.1)
    rows = ticks(min(losses), max(losses))
    dots = "".join(
        f'<path class="line alone" d="M{along(math.log(x) if by_factor else x):.1f} {_SIDE - up(y):.1f}h0" '
        f'stroke="var(--run-{index % 8})"/>'
        for x, y, index in points
    )
    grid = "".join(f'<path class="grid" d="M0 {_SIDE - up(y):.1f}H{_SIDE}"/>' for y in rows)
    left = "".join(
        f'<span style="bottom:{up(y) * 100 / _SIDE:.2f}%">{escape(text)}</span>'
        for y, text in zip(rows, labels(rows), strict=True)
    )
    shown = places[:: math.ceil(len(places) / 6)]
    below = "".join(
        f'<span style="left:{along(math.log(x) if by_factor else x) * 100 / _SIDE:.2f}%">{x:.3g}</span>' for x in shown
    )
    svg = f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" aria-hidden="true">{grid}{dots}</svg>'
    frame = f'<div class="frame"><div class="left">{left}</div><div class="field">{svg}</div><div class="below">{below}</div></div>'
    return f'<figure class="plot versus"><figcaption>validation loss over <code>{escape(key)}</code></figcaption>{frame}</figure>'


def _axis(values: Sequence[float], *, margin: float) -> Callable[[float], float]:
    """Return a function that maps a value to its position on an axis.

    The axis has length `_SIDE` and holds all `values`.
    """
    low, high = min(values), max(values)
    room = high - low
    if room == 0:
        return lambda _: _SIDE / 2
    return lambda value: _SIDE * (margin + (1 - 2 * margin) * (value - low) / room)
