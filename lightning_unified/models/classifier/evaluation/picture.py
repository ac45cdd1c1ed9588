"""Plot a report as one PNG: the confusion matrix and the reliability diagram."""

from pathlib import Path
from typing import Any

from lightning_unified.models.classifier.evaluation.report import Report

__all__ = ["draw", "figure_of"]

_MOST_NUMBERS = 24  # classes; up to this number, every cell shows its number


def draw(report: Report, path: str | Path) -> Path:
    """Draw `report` and return the path of the PNG.

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    figure = figure_of(report)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return path


def figure_of(report: Report) -> Any:
    """Return the matplotlib figure of `report`.

    Raises:
        RuntimeError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"a picture needs matplotlib, which is not installed ({error}); pip install matplotlib."
        ) from error
    side = max(4.0, 0.34 * len(report.label_names) + 2.0)
    figure = Figure(figsize=(side + 5.0, side), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[side, 4.2])
    _confusion(left, report)
    _reliability(right, report)
    return figure


def _confusion(axes: Any, report: Report) -> None:
    shares = [[count / max(sum(row), 1) for count in row] for row in report.confusion]
    places = range(len(report.label_names))
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set_xticks(places, report.label_names, rotation=90)
    axes.set_yticks(places, report.label_names)
    axes.set(xlabel="predicted", ylabel="label")
    axes.set_title(f"{report.rows:,} rows: accuracy {report.accuracy:.4f}, macro F1 {report.macro_f1:.4f}", fontsize=10)
    if len(report.label_names) > _MOST_NUMBERS:
        return
    for row in places:
        for column in places:
            colour = "white" if shares[row][column] > 0.5 else "black"
            axes.text(column, row, report.confusion[row][column], ha="center", va="center", color=colour, fontsize=7)


def _reliability(axes: Any, report: Report) -> None:
    bins = [(confidence, accuracy, rows) for rows, confidence, accuracy in report.reliability if rows]
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    axes.plot([point[0] for point in bins], [point[1] for point in bins], marker="o", color="#0072b2")
    axes.bar(
        [point[0] for point in bins], [point[2] / report.rows for point in bins], width=0.03, alpha=0.3, color="#e69f00"
    )
    axes.set(xlabel="confidence (bars: share of rows)", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    error = report.scaled_calibration_error
    scaled = "" if error is None else f", {error:.4f} at temperature {report.temperature:.2f}"
    axes.set_title(f"calibration error {report.calibration_error:.4f}{scaled}", fontsize=10)
    axes.grid(alpha=0.3)
