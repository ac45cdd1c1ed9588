"""A chart of curves over steps: SVG lines that stretch, with text as HTML above them."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from lightning_unified.cli.report.html.scale import Unit, amount, labels, ticks
from lightning_unified.cli.run.metrics import Curve

__all__ = ["Band", "Level", "Line", "Mark", "Plot", "draw"]

_NAME_HEIGHT = 6.6  # per cent of a chart's height
_SIDE = 1000  # of the square that is stretched into the chart's frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve with its color, style and kind.

    `color` names a color of the style sheet. `style` is solid, dashed or dotted. `steps` draws a step function.
    """

    label: str
    curve: Curve
    color: str
    style: str = "solid"
    steps: bool = False
    in_legend: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A horizontal line with its name on it."""

    label: str
    value: float
    color: str
    style: str = "dashed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A horizontal band behind the curves."""

    label: str
    low: float
    high: float
    color: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at a step; its text appears beside the values."""

    step: int
    text: str
    color: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """The contents of a chart.

    Attributes:
        title: The title.
        lines: The curves; a chart without curves says that the values are unknown.
        unit: The unit of the values.
        note: Small text beside the title.
        levels: Horizontal lines.
        bands: Horizontal bands behind the curves.
        marks: Vertical lines.
        from_zero: Whether the axis begins at 0.
        whole: Whether ticks are whole numbers.
        across: First and last step of the axis; default those of the curves.
        points: The largest number of points drawn per curve.
        legend: Further entries: text, color, style.
    """

    title: str
    lines: Sequence[Line]
    unit: Unit = ""
    note: str = ""
    levels: Sequence[Level] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    from_zero: bool = True
    whole: bool = False
    across: tuple[int, int] | None = None
    points: int = 500
    legend: Sequence[tuple[str, str, str]] = field(default_factory=tuple)


def draw(plot: Plot) -> str:
    """Return the chart as HTML; a chart without any value says so."""
    lines = [line for line in plot.lines if line.curve.last is not None]
    title = (
        f"<figcaption>{escape(plot.title)}{f' <small>{escape(plot.note)}</small>' if plot.note else ''}</figcaption>"
    )
    if not lines:
        return f'<figure class="plot empty">{title}<p class="unknown">unknown: no such metric was logged</p></figure>'
    view = _View.of(plot, lines)
    shapes = [*_bands(plot, view), *_grid(view), *_levels(plot, view), *_marks(plot, view)]
    shapes += [_path(line, view, most=plot.points) for line in lines]
    svg = f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
    left = "".join(
        f'<span style="bottom:{view.up(y):.2f}%">{escape(text)}</span>'
        for y, text in zip(view.rows, labels(view.rows, plot.unit), strict=True)
    )
    below = "".join(f'<span style="left:{view.along(x):.2f}%">{x:,.0f}</span>' for x in view.columns)
    data = json.dumps(_data(plot, lines, view), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    names = "".join(_names(plot, view))
    inner = f'<div class="field" tabindex="0">{svg}{names}<i class="cursor"></i><div class="tip"></div></div>'
    frame = f'<div class="frame"><div class="left">{left}</div>{inner}<div class="below">{below}</div></div>'
    source = f'<script type="application/json">{data}</script>'
    return f'<figure class="plot">{title}{frame}{_legend(plot, lines)}{source}</figure>'


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """The visible part of the plane, with its ticks."""

    x: tuple[float, float]
    y: tuple[float, float]
    rows: list[float]
    columns: list[float]

    @classmethod
    def of(cls, plot: Plot, lines: Sequence[Line]) -> "_View":
        steps = [step for line in lines for step in line.curve.steps] + [mark.step for mark in plot.marks]
        values = [value for line in lines for value in line.curve.values if value is not None]
        values += [level.value for level in plot.levels] + [band.high for band in plot.bands]
        low, high = min(values), max(values)
        if plot.from_zero and low >= 0:
            low = 0.0
        if high == low:
            low, high = low - abs(low) / 2, high + (abs(high) / 2 or 1.0)
        room = high - low
        bounds = (low if low == 0 else low - 0.06 * room, high + 0.08 * room)
        first, last = plot.across or (min(steps), max(steps))
        across = (float(first), float(last)) if last > first else (first - 0.5, first + 0.5)
        return cls(
            x=across,
            y=bounds,
            rows=ticks(*bounds, unit=plot.unit, whole=plot.whole),
            columns=ticks(*across, most=6, whole=True),
        )

    def along(self, x: float) -> float:
        """Return `x` in percent of the width, from the left."""
        return 100 * (x - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, y: float) -> float:
        """Return `y` in percent of the height, from the bottom."""
        return 100 * (y - self.y[0]) / (self.y[1] - self.y[0])

    def at(self, x: float, y: float) -> str:
        """Return a point in coordinates of the stretched square."""
        return f"{self.along(x) * _SIDE / 100:.1f} {_SIDE - self.up(y) * _SIDE / 100:.1f}"


def _grid(view: _View) -> Iterable[str]:
    for y in view.rows:
        yield f'<path class="grid" d="M{view.at(view.x[0], y)}L{view.at(view.x[1], y)}"/>'


def _bands(plot: Plot, view: _View) -> Iterable[str]:
    for band in plot.bands:
        top, bottom = view.up(band.high), view.up(band.low)
        box = f'x="0" width="{_SIDE}" y="{_SIDE - top * _SIDE / 100:.1f}" height="{(top - bottom) * _SIDE / 100:.1f}"'
        yield f'<rect class="held" {box} fill="var(--{band.color})"/>'


def _levels(plot: Plot, view: _View) -> Iterable[str]:
    for level in plot.levels:
        ends = f"M{view.at(view.x[0], level.value)}L{view.at(view.x[1], level.value)}"
        yield f'<path class="level {level.style}" d="{ends}" stroke="var(--{level.color})"/>'


def _marks(plot: Plot, view: _View) -> Iterable[str]:
    for step, color in dict.fromkeys((mark.step, mark.color) for mark in plot.marks):
        x = view.along(step) * _SIDE / 100
        yield f'<path class="mark" d="M{x:.1f} 0V{_SIDE}" stroke="var(--{color})"/>'


def _path(line: Line, view: _View, *, most: int) -> str:
    """Return the path of a line, broken where a value is not finite; a single value is a dot."""
    words, pen, previous = [], "M", 0.0
    for step, value in _thinned(line.curve, most=most):
        if value is None:
            pen = "M"
            continue
        if line.steps and pen == "L":
            words.append(f"L{view.at(step, previous)}")
        words.append(f"{pen}{view.at(step, value)}")
        pen, previous = "L", value
    alone = "h0" if len(words) == 1 else ""
    dots = " alone" if alone else ""
    return f'<path class="line {line.style}{dots}" d="{"".join(words)}{alone}" stroke="var(--{line.color})"/>'


def _thinned(curve: Curve, *, most: int) -> list[tuple[int, float | None]]:
    """Return about `most` points of a curve.

    They are the minimum and maximum of each stretch of steps, and values that are not finite.
    """
    points = list(zip(curve.steps, curve.values, strict=True))
    if len(points) <= most:
        return points
    width = math.ceil(len(points) / (most // 2))
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [(value, step) for step, value in stretch if value is not None]
        if len(finite) < len(stretch):
            kept.append(next(point for point in stretch if point[1] is None))
        kept += [(step, value) for value, step in {min(finite), max(finite)}] if finite else []
    ends = [points[0], points[-1]]
    return sorted({*kept, *ends}, key=lambda point: (point[0], point[1] is None))


def _names(plot: Plot, view: _View) -> Iterable[str]:
    """Yield the names of levels, each on its line.

    Where lines are close, a name stands below the previous name.
    """
    place = math.inf
    for level in sorted(plot.levels, key=lambda level: -level.value):
        place = min(view.up(level.value), place - _NAME_HEIGHT)
        text = f"{escape(level.label)} {escape(amount(level.value, plot.unit))}"
        yield f'<b class="name" style="bottom:{place:.2f}%;color:var(--{level.color})">{text}</b>'


def _legend(plot: Plot, lines: Sequence[Line]) -> str:
    entries = [(line.label, line.color, line.style) for line in lines if line.in_legend]
    entries += [(band.label, band.color, "band") for band in plot.bands]
    entries += list(dict.fromkeys(plot.legend))
    items = "".join(
        f'<li><i class="swatch {style}" style="--c:var(--{color})"></i>{escape(label)}</li>'
        for label, color, style in entries
    )
    return f'<ul class="legend">{items}</ul>' if entries else ""


def _data(plot: Plot, lines: Sequence[Line], view: _View) -> dict[str, Any]:
    """Return the data shown at the pointer: the marks and the points of each line.

    The points are rounded to six digits.
    """
    series = []
    for line in lines:
        points = _thinned(line.curve, most=plot.points)
        series.append(
            {
                "label": line.label,
                "color": line.color,
                "x": [step for step, _ in points],
                "y": [None if value is None else float(f"{value:.6g}") for _, value in points],
            }
        )
    marks = [{"x": mark.step, "text": mark.text, "color": mark.color} for mark in plot.marks]
    return {"unit": plot.unit, "range": view.x, "series": series, "marks": marks}
