"""A plan as a picture: categories against the budget, the course of the step, alternatives."""

from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_unified.cost_model.candidates import describe_split
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.facts import format_share
from lightning_unified.cost_model.render.planned import phase_of, prediction_of, recomputed
from lightning_unified.cost_model.render.tables import ordered
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.environment.watermarks import Watermarks
from lightning_unified.units import GIB, KIB, MIB, format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["to_png"]

_STAYS = {"weights": "#1f4e79", "gradients": "#2f75b5", "optimizer state": "#5b9bd5", "buffers": "#9dc3e6"}
_PASSES = {
    "gathered weights": "#7f6000",
    "communication": "#bf9000",
    "activations": "#c55a11",
    "logits": "#ed7d31",
    "temporaries": "#f4b183",
}
_BESIDE = {"batch": "#7f7f7f", "workspaces": "#a6a6a6", "callbacks": "#595959"}
_PHASES = {"forward": "#5b9bd5", "backward": "#2f75b5", "optimizer step": "#1f4e79", "validation": "#c55a11"}
_COLOURS = _STAYS | _PASSES | _BESIDE
_INK, _FAINT, _BUDGET, _LOW, _CHOSEN = "#222222", "#8a8a8a", "#b00020", "#d98c00", "#1a7f37"
_FAR = 4  # a budget this many times the need is named at the edge instead of drawn
_NEAR = 2  # a budget of at most this many times the largest alternative is drawn beside them
_LONGEST, _LETTER = 44, 0.022  # most letters of a place; share of the width a letter takes
_CROWDED, _ROOMY = (
    0.6,
    0.2,
)  # shares of the width: end of a bar beyond which its label goes left; least length of a bar that holds its label


def to_png(
    planned: Plan | Prediction,
    path: str | Path,
    *,
    title: str = "Plan",
    watermarks: Watermarks | None = None,
) -> Path:
    """Draw a plan or a prediction into the PNG file `path` and return the path.

    Args:
        planned: A plan, or a prediction alone; a plan that does not fit shows its alternatives.
        path: File to write; its folder is created if it is missing.
        title: Title in one line.
        watermarks: Bytes to mark beside the budget.

    Raises:
        ConfigurationError: If matplotlib is not installed, the plan holds nothing to draw, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            f"a picture needs matplotlib, which is not installed ({error}); pip install matplotlib, or leave the picture out."
        ) from error
    prediction = prediction_of(planned)
    weighed = None if isinstance(planned, Prediction) or not planned.alternatives else planned
    if prediction is None and weighed is None:
        raise ConfigurationError("this plan has no prediction, so there is nothing to draw; set memory.predict=true.")
    bars = 0 if prediction is None else len(ordered(prediction)) + 2
    steps = prediction is not None and bool(prediction.instants)
    below = [name for name, there in (("step", steps), ("weighed", weighed is not None)) if there]
    above = [["categories"] * max(len(below), 1)] if bars else []
    heights = ([0.34 * bars + 0.9] if above else []) + ([3.2] if below else [])
    figure = Figure(figsize=(11, sum(heights) + 1.4), dpi=130)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.12)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK)
    layout: Any = above + ([below] if below else [])
    axes = figure.subplot_mosaic(layout, height_ratios=heights)
    if prediction is not None:
        budget = None if isinstance(planned, Prediction) else planned.budget_bytes
        _categories(axes["categories"], prediction, budget_bytes=budget, marks=watermarks)
    if prediction is not None and steps:
        _step(axes["step"], prediction)
    if weighed is not None:
        _weighed(axes["weighed"], weighed)
    return _save(figure, Path(path))


def _save(figure: "Figure", path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}; name a file that can."
        ) from error
    return path


def _categories(axes: "Axes", prediction: Prediction, *, budget_bytes: int | None, marks: Watermarks | None) -> None:
    """Draw each category from the end of the one before it, then the allocator's total."""
    parts = ordered(prediction)
    ends = list(accumulate(count for _, count in parts))
    bars = [
        (name, end - count, count, _COLOURS.get(name, _FAINT)) for (name, count), end in zip(parts, ends, strict=True)
    ]
    bars += [
        ("peak of tensors", 0, prediction.peak_bytes, _INK),
        ("reserved by the allocator", 0, prediction.reserved_bytes, _FAINT),
    ]
    unit, name = _unit(max(prediction.peak_bytes, prediction.reserved_bytes))
    need = max(prediction.peak_bytes, prediction.reserved_bytes, 1)
    near = budget_bytes is not None and budget_bytes <= _FAR * need
    right = 1.16 * max(need, budget_bytes if near and budget_bytes else 0)
    for row, (_, start, count, colour) in enumerate(bars):
        axes.barh(row, max(count, 0.002 * right) / unit, left=start / unit, color=colour, height=0.68, zorder=2)
        share = f"  {format_share(count / max(prediction.peak_bytes, 1))}" if row < len(parts) else ""
        _label(
            axes,
            row,
            f"{format_bytes(count)}{share}",
            start=start / unit,
            end=(start + count) / unit,
            right=right / unit,
        )
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=9.5)
    axes.invert_yaxis()
    axes.set_xlim(0, right / unit)
    axes.set_xlabel(name, fontsize=9, color=_FAINT)
    axes.set_title(f"Peak by category: {_short(prediction.instant, 100)}", loc="left", fontsize=10, color=_INK)
    _clean(axes, grid="x")
    if budget_bytes is not None and near:
        _mark(axes, budget_bytes / unit, f"budget {format_bytes(budget_bytes)}", _BUDGET, "-")
        if marks is not None and marks.low < budget_bytes:
            _mark(axes, marks.low / unit, f"caches cleared {format_bytes(marks.low)} ", _LOW, "--", left=True)
        if marks is not None and marks.high < budget_bytes:
            _mark(axes, marks.high / unit, f"cap {format_bytes(marks.high)}", _LOW, "-.")
    elif budget_bytes is not None:
        axes.text(
            1.0,
            1.02,
            f"budget {format_bytes(budget_bytes)} →",
            transform=axes.transAxes,
            ha="right",
            fontsize=9,
            color=_BUDGET,
        )


def _label(axes: "Axes", row: int, words: str, *, start: float, end: float, right: float) -> None:
    """Write a bar's label behind it; beyond the crowded edge, inside the bar or before it."""
    gap, colour = 0.008 * right, _INK
    x, side = end + gap, "left"
    if end > _CROWDED * right:
        inside = end - start > _ROOMY * right
        x, side = (end - gap, "right") if inside else (start - gap, "right")
        colour = "white" if inside else _INK
    axes.text(x, row, words, va="center", ha=side, fontsize=9, color=colour, zorder=4)


def _mark(axes: "Axes", x: float, words: str, colour: str, style: str, *, left: bool = False) -> None:
    axes.axvline(x, color=colour, linestyle=style, linewidth=1.4, zorder=3)
    axes.annotate(
        words,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if left else 3, -2),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=8.5,
        color=colour,
        rotation=90,
    )


def _step(axes: "Axes", prediction: Prediction) -> None:
    """Draw the peak of each place in the order of the step, by phase, and mark the highest."""
    heights = [count for _, count in prediction.instants]
    unit, name = _unit(max(heights))
    at = 0
    for phase, members in groupby(phase_of(words) for words, _ in prediction.instants):
        width = len(list(members))
        tops = [height / unit for height in heights[at : at + width]]
        colour = _PHASES.get(phase, _FAINT)
        axes.fill_between(
            range(at, at + width + 1), [*tops, tops[-1]], step="post", color=colour, linewidth=0, zorder=2
        )
        if width >= _LETTER * len(phase) * len(heights):
            axes.text(
                at + width / 2,
                0.03,
                phase,
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=8.5,
                color="white",
            )
        at += width
    top = max(range(len(heights)), key=lambda place: heights[place])
    axes.plot([top + 0.5], [heights[top] / unit], marker="v", color=_BUDGET, markersize=7, zorder=4)
    axes.set_xlim(0, len(heights))
    axes.set_ylim(0, 1.12 * heights[top] / unit)
    axes.set_xticks([])
    axes.set_xlabel("places, in the order of the step", fontsize=9, color=_FAINT)
    axes.set_ylabel(name, fontsize=9, color=_FAINT)
    _title(axes, f"Peak by place: {_short(prediction.instants[top][0], _LONGEST)}", mark="▼", colour=_BUDGET)
    _clean(axes, grid="y")


def _weighed(axes: "Axes", plan: Plan) -> None:
    """Draw each alternative by reserved bytes and seconds.

    The best is lowest, left of the budget.
    """
    dots = [(each.reserved_bytes, each.seconds) for each in plan.alternatives]
    best, words = plan.prediction, "nothing fits"
    if best is not None and best.seconds is not None:
        dots.append((best.reserved_bytes, best.seconds))
        words = f"{describe_split(best.rows, best.num_micro_batches)}, recompute {recomputed(plan)}"
    unit, name = _unit(max(taken for taken, _ in dots))
    for each in plan.alternatives:
        face, edge = (_STAYS["optimizer state"], _STAYS["gradients"]) if each.fits else ("none", _FAINT)
        axes.scatter(each.reserved_bytes / unit, each.seconds, s=36, color=face, edgecolors=edge, zorder=3)
    if best is not None and best.seconds is not None:
        axes.scatter(best.reserved_bytes / unit, best.seconds, s=90, color=_CHOSEN, zorder=4)
    _title(axes, f"Seconds a step: {words}", mark="●", colour=_FAINT if best is None else _CHOSEN)
    most = max(taken for taken, _ in dots)
    right = max(most, plan.budget_bytes) if plan.budget_bytes <= _NEAR * most or best is None else most
    if right >= plan.budget_bytes:
        _mark(axes, plan.budget_bytes / unit, "budget", _BUDGET, "-")
    axes.set_xlim(0, 1.08 * right / unit)
    axes.set_ylim(0, 1.15 * max(seconds for _, seconds in dots))
    axes.yaxis.set_major_formatter(lambda seconds, _: format_duration(seconds) if seconds else "0")
    axes.set_xlabel(f"reserved by the allocator, {name} (hollow: does not fit)", fontsize=9, color=_FAINT)
    _clean(axes, grid="both")


def _title(axes: "Axes", words: str, *, mark: str, colour: str) -> None:
    """Write a panel's title behind the mark that it explains."""
    axes.set_title(f"    {words}", loc="left", fontsize=10, color=_INK)
    axes.text(0, 1.016, mark, transform=axes.transAxes, fontsize=10, color=colour, va="bottom", ha="left")


def _clean(axes: "Axes", *, grid: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#cccccc")
    axes.tick_params(colors="#444444", labelsize=8.5, length=0)
    axes.grid(axis=grid, color="#e6e6e6", linewidth=0.8, zorder=0)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)


def _unit(most: int) -> tuple[int, str]:
    return next(
        ((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if most >= unit), (1, "bytes")
    )


def _short(words: str, longest: int) -> str:
    """Return `words` with the middle left out if they are too long; both ends identify a place."""
    if len(words) <= longest:
        return words
    keep = (longest - 1) // 2
    return f"{words[:keep]}…{words[-keep:]}"
