"""PNG plots of a run's metrics by step: losses, memory, and rewards and games if logged."""

import math
import re
from pathlib import Path

from lightning_unified.cli.run.metrics import Curve, read_curves

__all__ = ["draw_plots"]

_PLOTS = {
    "loss.png": ("loss", r"(train|val)/loss", 1.0),
    "rewards.png": ("mean reward", r"train/reward(_\w+)?", 1.0),
    "games.png": ("share", r"(val|sft)/(win_rate|format|valid|consistent)", 1.0),
    "memory.png": ("GiB", r"memory(_simulated_[^/]+)?/(allocated|reserved|peak|available)", 2.0**30),
}

_FEW = 3  # lines; a legend inside the axes hides none of them


def draw_plots(metrics: Path, directory: Path) -> list[Path]:
    """Draw one plot for each known group of columns in `metrics`, and return the files.

    The files lie in `directory`.
    """
    columns = read_curves([metrics] if metrics.is_file() else [])
    drawn = []
    for file, (label, pattern, unit) in _PLOTS.items():
        present = sorted(name for name in columns if re.fullmatch(pattern, name))
        if present:
            directory.mkdir(parents=True, exist_ok=True)
            _draw({name: columns[name] for name in present}, label=label, unit=unit, path=directory / file)
            drawn.append(directory / file)
    return drawn


def _draw(columns: dict[str, Curve], *, label: str, unit: float, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_crowded = len(columns) > _FEW
    figure = Figure(figsize=(9 if is_crowded else 7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in columns.items():
        values = [math.nan if value is None else value / unit for value in curve.values]
        axes.plot(curve.steps, values, label=name, marker="o" if len(values) < 20 else None, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if is_crowded:
        figure.legend(loc="outside right upper")
    else:
        axes.legend()
    figure.savefig(path, dpi=120)
