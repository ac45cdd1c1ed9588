"""Draw the record of memory_over_time.py, once for light and once for dark pages."""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

__all__ = ["draw"]

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d0d7de", "page": "#ffffff", "line": "#0969da", "limit": "#cf222e"},
    "dark": {"text": "#e6edf3", "grid": "#30363d", "page": "#0d1117", "line": "#58a6ff", "limit": "#ff7b72"},
}
MIB_PER_GIB = 1024


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Write `recovery-light.png` and `recovery-dark.png` into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context({"font.size": 9}):
        for name, theme in THEMES.items():
            figure = _figure(record, theme)
            paths.append(folder / f"recovery-{name}.png")
            drawn = BytesIO()
            figure.savefig(drawn, facecolor=theme["page"], dpi=150)
            Image.open(drawn).convert("RGB").quantize(48).save(paths[-1], optimize=True)  # a fifth of the bytes
    return paths


def _figure(record: dict[str, Any], theme: dict[str, str]) -> Figure:
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    panels = figure.subplots(len(record["runs"]), 1, sharex=True, sharey=True)
    for axes, run in zip(panels, record["runs"], strict=True):
        _panel(axes, run, record, theme)
    panels[-1].set_xlabel(
        f"optimizer step (batches of {record['rows']} rows; rows of {record['tokens'][0]} tokens, at marked steps {record['tokens'][1]})",
        color=theme["text"],
    )
    panels[len(panels) // 2].set_ylabel("live memory (GiB)", color=theme["text"])
    return figure


def _panel(axes: Axes, run: dict[str, Any], record: dict[str, Any], theme: dict[str, str]) -> None:
    """Draw one run: within a step, its samples stand at equal distances."""
    places, heights = [], []
    for number, step in enumerate(run["steps"], 1):
        values = step["mib"]
        places += [number - 0.5 + (index + 0.5) / len(values) for index in range(len(values))]
        heights += [value / MIB_PER_GIB for value in values]
    limit = record["limit_bytes"] / 2**30
    axes.fill_between(places, heights, color=theme["line"], alpha=0.25, linewidth=0)
    axes.plot(places, heights, color=theme["line"], linewidth=1)
    axes.axhline(limit, color=theme["limit"], linestyle="--", linewidth=1)
    for step in record["long_steps"]:
        axes.axvspan(step + 0.5, step + 1.5, color=theme["grid"], alpha=0.4, linewidth=0)
    axes.set_title(_title(run), loc="left", color=theme["text"], fontsize=9.5)
    axes.text(20.45, limit + 0.04, f"limit {limit:.2f} GiB", ha="right", va="bottom", color=theme["limit"], fontsize=8)
    axes.set_xlim(0.5, 20.5)
    axes.set_ylim(0, 1.25 * limit)
    axes.set_xticks([1, *(step + 1 for step in record["long_steps"]), 20])
    axes.set_facecolor(theme["page"])
    axes.tick_params(colors=theme["text"], length=0)
    axes.grid(axis="y", color=theme["grid"], linewidth=0.5)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    failed = len(run["steps"]) if run["error"] else None
    if failed:
        axes.annotate(
            "out of memory: the run ends", (failed + 0.25, heights[-1]), (failed + 1.0, 0.75), color=theme["limit"]
        )


def _title(run: dict[str, Any]) -> str:
    """Return what the strategy did at the long batches, from the record."""
    if run["error"]:
        return "plain Lightning"
    split = {step["micro_batch_size"] for step in run["steps"] if step["recoveries"]}
    if split:
        rows = min(split)
        recovered = next(number for number, step in enumerate(run["steps"], 1) if step["recoveries"])
        return (
            f"UnifiedStrategy(predict=False): step {recovered} is undone and repeated in micro-batches of {rows} rows"
        )
    planned = [event for event in run["events"] if "the whole batch" in event and "activation checkpointing" in event]
    how = "with activation checkpointing" if planned else "without a failed attempt"
    return f"UnifiedStrategy(), the default: the long steps run whole, {how}, as planned before them"
