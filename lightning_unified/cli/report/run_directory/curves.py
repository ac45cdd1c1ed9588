"""A run's `metrics.csv` as curves, whatever state a crash left it in."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from lightning_unified.cli.report.run_directory.records import Curve

__all__ = ["read_curves"]

_NO_METRIC = ("step", "epoch")


def read_curves(files: Iterable[Path]) -> dict[str, Curve]:
    """Return the columns of `files`, the oldest first, each as one curve; cells that hold no number are left out.

    Where the steps of a column go back, a resumed run has begun: what was logged from there on before is not part of the run that
    is told of, and gives way to what the resumed run logged.
    """
    columns: dict[str, list[tuple[int, float | None]]] = {}
    for file in files:
        for step, name, value in _cells(file):
            points = columns.setdefault(name, [])
            while points and points[-1][0] >= step:
                points.pop()
            points.append((step, value))
    return {
        name: Curve(steps=tuple(step for step, _ in points), values=tuple(value for _, value in points))
        for name, points in columns.items()
    }


def _cells(file: Path) -> Iterable[tuple[int, str, float | None]]:
    """Yield (step, column, value) of every cell that holds a number; a number that is not finite is None."""
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        for row in csv.DictReader(line.replace("\0", "") for line in lines):
            step = _number(row.get("step"))
            if step is None or not math.isfinite(step):
                continue
            for name, text in row.items():
                value = _number(text) if name and name not in _NO_METRIC else None
                if value is not None:
                    yield int(step), name, value if math.isfinite(value) else None


def _number(text: object) -> float | None:
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None
