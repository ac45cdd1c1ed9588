"""The charts of a page: memory, micro-batches, recoveries, losses, speed, other metrics."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_unified.cli.report.html.svg import Band, Level, Line, Mark, Plot
from lightning_unified.cli.report.run_directory.figures import (
    budget_bytes,
    budget_curve,
    categories,
    held,
    memory_curve,
    number,
    predicted_peak,
    recovery_curve,
)
from lightning_unified.cli.report.run_directory.records import Moment, Run
from lightning_unified.cli.run.metrics import Curve
from lightning_unified.units import format_bytes

__all__ = ["across", "course_plots", "loss_plots", "memory_plots", "other_plots", "slug", "speed_plots"]

_STAGE = re.compile(r"(train|val|valid|validation|test)[/_.](.+)")
_KINDS = re.compile(r"_(step|epoch)$")
_STYLES = {"train": "solid", "test": "dotted"}
_MARKED = {"recovery": "bad", "pressure": "warn", "failed": "bad", "began": "soft"}
_MOST_OTHERS = 16
_FIGURES = {
    "allocated": "live tensors; on a CPU the process",
    "reserved": "by the allocator",
    "peak": "maximum so far",
}
_FAR = 2.5  # a level above this multiple of the curves gets a second chart without it


def across(runs: Sequence[Run]) -> tuple[int, int] | None:
    """Return the first and last step of all charts of a page.

    The first step is 0 unless the runs begin far from it.
    """
    steps = [step for run in runs for curve in run.curves.values() for step in (curve.steps[0], curve.steps[-1])]
    steps += [moment.step for run in runs for moment in run.moments if moment.step is not None]
    if not steps:
        return None
    return (0 if 2 * min(steps) <= max(steps) else min(steps)), max(steps)


def slug(text: str) -> str:
    """Return `text` as a color name of the style sheet."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def memory_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the charts of memory over steps.

    A single run has one chart with all figures; several runs have one chart per figure.
    """
    if len(runs) == 1:
        whole = _memory_of(runs[0])
        closer = _closer(whole, title="The same, closer")
        return [whole] if closer is whole else [whole, closer]
    plots = []
    for figure, note in _FIGURES.items():
        lines = _lines(runs, lambda run, figure=figure: memory_curve(run, figure))
        if lines:
            title = f"Memory {figure}"
            plot = Plot(title=title, note=note, lines=lines, unit="bytes", levels=_shared_budgets(runs))
            plots.append(_closer(plot, title=title))
    return plots or [Plot(title="Memory", lines=(), unit="bytes")]


def _memory_of(run: Run) -> Plot:
    """Return one run's memory over steps, with its budget, watermarks and predicted categories."""
    lines = [
        Line(label=figure, curve=curve, color=figure, style="dashed" if figure == "peak" else "solid")
        for figure in _FIGURES
        if (curve := memory_curve(run, figure)) is not None
    ]
    followed = budget_curve(run)
    if followed is not None:
        lines.append(Line(label="budget", curve=followed, color="budget", steps=True))
    parts, note = categories(run), "bands: categories of the predicted peak"
    if not parts:
        parts, note = held(run), "bands: memory held before any activation"
    tops = list(accumulate(parts.values()))
    bands = [
        Band(label=f"{name} {format_bytes(round(size))}", low=top - size, high=top, color=slug(name))
        for (name, size), top in zip(parts.items(), tops, strict=True)
    ]
    return Plot(
        title="Memory over steps",
        note=note if bands else "",
        lines=lines,
        unit="bytes",
        levels=_levels_of(run, followed=followed is not None),
        bands=bands,
        marks=_marks(run),
    )


def _closer(plot: Plot, *, title: str) -> Plot:
    """Return `plot` without levels far above its curves, or `plot` itself if there are none."""
    values = [value for line in plot.lines for value in line.curve.values if value is not None]
    top = max([*values, *(band.high for band in plot.bands)], default=0.0)
    near = [level for level in plot.levels if level.value <= _FAR * top]
    if not values or len(near) == len(plot.levels):
        return plot
    far = ", ".join(f"{level.label} {format_bytes(round(level.value))}" for level in plot.levels if level not in near)
    notes = [note for note in (plot.note if title == plot.title else "", f"above: {far}") if note]
    return replace(plot, title=title, note="; ".join(notes), levels=near)


def _levels_of(run: Run, *, followed: bool) -> list[Level]:
    budget, low, high = budget_bytes(run), number(run.machine, "low_bytes"), number(run.machine, "high_bytes")
    named = [
        ("budget", None if followed else budget, "budget", "solid"),
        ("high mark", None if high == budget or followed else high, "budget", "dashed"),
        ("low mark", None if followed else low, "warn", "dashed"),
        ("predicted peak", predicted_peak(run), "predicted", "dotted"),
    ]
    return [
        Level(label=label, value=value, color=color, style=style)
        for label, value, color, style in named
        if value is not None
    ]


def _shared_budgets(runs: Sequence[Run]) -> list[Level]:
    """Return a line for each budget, named after its runs if budgets differ."""
    by_value: dict[float, list[str]] = {}
    for run in runs:
        budget = budget_bytes(run)
        if budget is not None:
            by_value.setdefault(budget, []).append(run.name)
    return [
        Level(
            label="budget" if len(by_value) == 1 else f"budget of {', '.join(names)}",
            value=value,
            color="budget",
            style="solid",
        )
        for value, names in by_value.items()
    ]


def course_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the charts of micro-batch size and recoveries over steps, with events as marks."""
    marks = (
        _marks(runs[0])
        if len(runs) == 1
        else [mark for index, run in enumerate(runs) for mark in _marks(run, index=index)]
    )
    sizes = _lines(runs, lambda run: memory_curve(run, "micro_batch_size"), steps=True)
    plots = [Plot(title="Micro-batch", note="rows that run at once", lines=sizes, unit="rows", marks=marks, whole=True)]
    counts = _lines(runs, recovery_curve, steps=True)
    if any(line.curve.last for line in counts):
        plots.append(
            Plot(
                title="Recoveries",
                note="steps repeated after memory ran out, so far",
                lines=counts,
                marks=marks,
                whole=True,
            )
        )
    return plots


def loss_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the charts of losses; training and validation losses of one name share a chart."""
    return _metric_plots(runs, lambda name: "loss" in name.lower()) or [Plot(title="Losses", lines=())]


def speed_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the charts of samples per second and time per batch."""
    named = (
        ("Samples per second", "speed/samples_per_second", ""),
        ("Time per batch", "speed/seconds_per_batch", "seconds"),
    )
    return [
        Plot(title=title, lines=_lines(runs, lambda run, column=column: run.curves.get(column)), unit=unit)
        for title, column, unit in named
    ]


def other_plots(runs: Sequence[Run]) -> list[Plot]:
    """Return the charts of all other metrics, at most `_MOST_OTHERS`."""
    plots = _metric_plots(runs, lambda name: "loss" not in name.lower())
    return plots[:_MOST_OTHERS]


def _metric_plots(runs: Sequence[Run], wanted: Callable[[str], bool]) -> list[Plot]:
    """Return a chart for each `wanted` metric; `train/x`, `val/x` and `x_epoch` share one."""
    groups: dict[str, set[str]] = {}
    for column in sorted({column for run in runs for column in run.curves}):
        if not column.startswith(("memory/", "memory_simulated_", "speed/")) and wanted(column):
            staged = _STAGE.fullmatch(column)
            groups.setdefault(_KINDS.sub("", staged.group(2) if staged else column), set()).add(column)
    plots = []
    for base, columns in sorted(groups.items()):
        lines: list[Line] = []
        for column in sorted(columns):
            alone = len(runs) == 1
            color = ("train" if _style(column) == "solid" else "val") if alone else None
            lines += _lines(
                runs, lambda run, column=column: run.curves.get(column), style=_style(column), label=column, color=color
            )
        styles = {_style(column): column for column in sorted(columns)}
        key = [] if len(runs) == 1 or len(styles) == 1 else [(name, "ink", style) for style, name in styles.items()]
        plots.append(Plot(title=base, lines=lines, from_zero=False, legend=key))
    return plots


def _style(column: str) -> str:
    staged = _STAGE.fullmatch(column)
    return _STYLES.get(staged.group(1), "dashed") if staged else "solid"


def _lines(
    runs: Sequence[Run],
    curve_of: Callable[[Run], Curve | None],
    *,
    steps: bool = False,
    style: str = "solid",
    label: str = "",
    color: str | None = None,
) -> list[Line]:
    """Return a line for each run that has the curve.

    The line is named after the run, or after its metric for a single run.
    """
    lines = []
    for index, run in enumerate(runs):
        curve = curve_of(run)
        if curve is not None and curve.last is not None:
            several = len(runs) > 1
            text = f"{run.name} {label}".strip() if several else label or run.name
            tint = color or f"run-{index % 8}"
            lines.append(
                Line(
                    label=text, curve=curve, color=tint, style=style, steps=steps, in_legend=bool(label) and not several
                )
            )
    return lines


def _marks(run: Run, *, index: int | None = None) -> list[Mark]:
    """Return marks for recoveries, pressure, failures and resumes.

    With several runs, a mark has the run's color.
    """
    return [
        Mark(
            step=moment.step,
            text=moment.text if index is None else f"{run.name}: {moment.text}",
            color=_MARKED[moment.kind] if index is None else f"run-{index % 8}",
        )
        for moment in _marked(run)
        if moment.step is not None
    ]


def _marked(run: Run) -> Iterable[Moment]:
    """Yield the moments that a chart marks; a start is marked only where the run was resumed."""
    return (moment for moment in run.moments if moment.kind in _MARKED and (moment.kind != "began" or moment.step))
