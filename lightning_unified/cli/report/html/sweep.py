"""The results of a sweep: runs from best to worst, and charts of the varied numbers.

The metric is the one that decides each run's best checkpoint. A chart shows it over a varied number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from lightning_unified.cli.report.html.scale import amount, labels, ticks
from lightning_unified.cli.report.html.tables import chip, table, text_of
from lightning_unified.cli.report.run_directory.configuration import flat
from lightning_unified.cli.report.run_directory.figures import at, number, validation_figure
from lightning_unified.cli.report.run_directory.records import Run

__all__ = ["varied_section"]

_MOST_FIGURES = 8
_SIDE = 1000  # of the square that is stretched into the chart's frame
_WIDE = 10  # a range of this ratio or more gets a logarithmic axis


@dataclass(frozen=True, kw_only=True, slots=True)
class _Metric:
    """The metric by which runs are ordered.

    Attributes:
        name: Its name without `val/`.
        is_score: Whether more is better.
    """

    name: str = "loss"
    is_score: bool = False

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "_Metric":
        """Return the metric that decides the best checkpoint of every run; the loss if they differ."""
        configs = [flat(run) for run in runs]
        found = {tuple(config.get(f"callbacks.checkpoint.{key}") for key in ("monitor", "mode")) for config in configs}
        monitor, mode = found.pop() if len(found) == 1 else (None, None)
        if not isinstance(monitor, str) or not monitor.startswith("val/"):
            return cls()
        return cls(name=monitor.removeprefix("val/"), is_score=mode == "max")

    @property
    def title(self) -> str:
        """The metric in words."""
        return "validation loss" if self.name == "loss" else self.name

    def value(self, run: Run) -> float:
        """Return a run's newest value; infinity without one, of the worse sign."""
        found = validation_figure(run, self.name)
        if found is None or not math.isfinite(found):
            return -math.inf if self.is_score else math.inf
        return found

    def rank(self, run: Run) -> float:
        """Return a number that is less for a better run."""
        return -self.value(run) if self.is_score else self.value(run)


def varied_section(runs: Sequence[Run]) -> str:
    """Return a table of the runs, best first, and a chart for each varied number.

    The result is empty if nothing was varied.
    """
    given = _varied(runs)
    if not given:
        return ""
    metric = _Metric.of(runs)
    drawn = {key: _points(values, runs, metric) for key, values in given.items()}
    charts = [_chart(key, points, metric) for key, points in drawn.items() if len({x for x, _, _ in points}) > 1]
    return _table(given, runs, metric) + (
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


def _table(given: dict[str, list[str | None]], runs: Sequence[Run], metric: _Metric) -> str:
    known = ["loss", *(name for run in runs for name in at(run.summary, "validation") or {})]
    names = [name for name in dict.fromkeys(known) if name != metric.name]
    names = [name for name in names if any(number(run.summary, "validation", name) is not None for run in runs)]
    names = names[:_MOST_FIGURES]
    order = sorted(range(len(runs)), key=lambda index: metric.rank(runs[index]))
    rows = []
    for place, index in enumerate(order):
        run = runs[index]
        figures = [validation_figure(run, name) for name in (metric.name, *names)]
        cells = [escape("default" if values[index] is None else str(values[index])) for values in given.values()]
        cells += [escape(amount(figure)) for figure in figures]
        cells += [escape(amount(number(run.summary, "seconds"), "seconds")), escape(run.status)]
        best = place == 0 and math.isfinite(metric.rank(run))
        rows.append([chip(index, run), *(f"<b>{cell}</b>" if best else cell for cell in cells)])
    titles = [metric.title, *("validation loss" if name == "loss" else name for name in names)]
    head = ["", *(f"<code>{escape(key)}</code>" for key in given), *map(escape, titles), "took", ""]
    return table(head, rows, kind="numbers")


def _points(values: Sequence[str | None], runs: Sequence[Run], metric: _Metric) -> list[tuple[float, float, int]]:
    """Return (value, metric, index) of each run that has both as finite numbers."""
    points = []
    for index, (value, run) in enumerate(zip(values, runs, strict=True)):
        try:
            x = float(value or "")
        except ValueError:
            continue
        if math.isfinite(x) and math.isfinite(y := metric.value(run)):
            points.append((x, y, index))
    return points


def _chart(key: str, points: Sequence[tuple[float, float, int]], metric: _Metric) -> str:
    """Return the chart of the metric over the values of `key`."""
    places = sorted({x for x, _, _ in points})
    by_factor = places[0] > 0 and places[-1] >= _WIDE * places[0]
    along = _axis([math.log(x) if by_factor else x for x in places], margin=0.08)
    figures = [y for _, y, _ in points]
    up = _axis(figures, margin=0.1)
    rows = ticks(min(figures), max(figures))
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
    return f'<figure class="plot versus"><figcaption>{escape(metric.title)} over <code>{escape(key)}</code></figcaption>{frame}</figure>'


def _axis(values: Sequence[float], *, margin: float) -> Callable[[float], float]:
    """Return a function that maps a value to its position on an axis.

    The axis has length `_SIDE` and holds all `values`.
    """
    low, high = min(values), max(values)
    room = high - low
    if room == 0:
        return lambda _: _SIDE / 2
    return lambda value: _SIDE * (margin + (1 - 2 * margin) * (value - low) / room)
