"""Show an evaluation record: tables for a terminal, and rate-distortion curves as a PNG."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

__all__ = ["plot", "tables", "write_record"]

_SHOWN = (
    ("dropped_cross_entropy", "Cross-entropy of dropped tokens, nats per token (lower is better)"),
    ("continuation_perplexity", "Perplexity of the continuation after the compressed text (lower is better)"),
    ("rouge_l", "ROUGE-L of the greedy reconstruction (higher is better)"),
)
_NATS = {"continuation_perplexity": "continuation_cross_entropy"}  # measure compared for each measure shown
_MARKS = {"policy": " ▲", "baseline": " ▼", "overlap": "", "unknown": ""}


def tables(record: dict[str, Any]) -> list[Table]:
    """Return a record's tables; ▲ marks baselines that the policy clearly beats, ▼ better ones."""
    keeps: Sequence[float] = record["settings"]["keeps"]
    cells = {(row["method"], row["keep"]): row for row in record["rows"]}
    verdicts = {(row["baseline"], row["keep"], row["measure"]): row["intervals"] for row in record["policy_against"]}
    found = []
    for name, title in _SHOWN:
        if name not in record["rows"][0]:
            continue
        table = Table(title=title, title_justify="left")
        table.add_column("method")
        for keep in keeps:
            table.add_column(f"keep {keep}", justify="right")
        for method in dict.fromkeys(row["method"] for row in record["rows"]):
            shown = [
                _interval(cells[method, keep][name])
                + _MARKS[verdicts.get((method, keep, _NATS.get(name, name)), "unknown")]
                for keep in keeps
            ]
            table.add_row(method, *shown, style="bold" if method == "policy" else None)
        found.append(table)
    return [*found, *_times(record)]


def _interval(point: dict[str, float | None]) -> str:
    mean, low, high = point["mean"], point["low"], point["high"]
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _times(record: dict[str, Any]) -> list[Table]:
    if not record["seconds"]:
        return []
    table = Table(title="Wall time of one batch, ms", title_justify="left")
    for name in ("keep", "policy", "LM on the kept", "LM on all", "ratio"):
        table.add_column(name, justify="right")
    for row in record["seconds"]:
        times = [row[name] * 1000 for name in ("policy_seconds", "lm_compressed_seconds", "lm_full_seconds")]
        table.add_row(str(row["keep"]), *(f"{value:.1f}" for value in times), f"{row['ratio']:.2f}")
    return [table]


_PANELS = (
    ("dropped_cross_entropy", "cross-entropy of dropped tokens, nats"),
    ("continuation_perplexity", "perplexity of the continuation\n(dotted: after the full text)"),
    ("rouge_l", "ROUGE-L of the reconstruction"),
)
# distinguishable for colour-blind readers
_COLOURS = ("#0072b2", "#999999", "#e69f00", "#56b4e9", "#cc79a7", "#009e73", "#d55e00")


def write_record(record: dict[str, Any], folder: Path, *, name: str) -> None:
    """Write a record as `name`.json and its plot as `name`.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    plot(record, folder / f"{name}.png")


def plot(record: dict[str, Any], path: str | Path) -> Path:
    """Draw `record`, which `evaluate` has returned, and return the path of the PNG.

    Raises:
        RuntimeError: If matplotlib is not installed.
        ValueError: If the record has no rows.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"a plot needs matplotlib, which is not installed ({error}); pip install matplotlib."
        ) from error
    if not record.get("rows"):
        raise ValueError("the record has no rows, so there is nothing to draw; give one that `evaluate` has written.")
    panels = [(name, label) for name, label in _PANELS if name in record["rows"][0]]
    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for place, (method, rows) in enumerate(_curves(record).items()):
            centre, below, above = _points(rows, name)
            is_policy = method == "policy"
            shifted = [row["keep"] + (place - 3) * 0.004 for row in rows]  # so that intervals do not overlap
            axes.errorbar(
                shifted,
                centre,
                yerr=[below, above],
                label=method.replace("_", " "),
                color=_COLOURS[place % len(_COLOURS)],
                linewidth=2.2 if is_policy else 1.2,
                marker="o" if is_policy else ".",
                capsize=2,
                zorder=3 if is_policy else 2,
            )
        if name == "continuation_perplexity":
            full = record["language_model"]["full_context_continuation_perplexity"]
            axes.axhline(full, color="black", linestyle=":", linewidth=1)
        axes.set(xlabel="share of tokens kept", ylabel=label)
        axes.grid(alpha=0.3)
    figure.axes[-1].legend(fontsize=8)
    figure.suptitle(f"{record['documents']} held-out documents, 95 % bootstrap intervals", fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _curves(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(record["rows"], key=lambda row: row["keep"]):
        curves.setdefault(row["method"], []).append(row)
    return curves


def _points(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float], list[float]]:
    """Return means and the two sides of their intervals, 0 without an interval."""
    found = [row[name] for row in rows]
    below = [0.0 if point["low"] is None else max(point["mean"] - point["low"], 0.0) for point in found]
    above = [0.0 if point["high"] is None else max(point["high"] - point["mean"], 0.0) for point in found]
    return [point["mean"] for point in found], below, above
