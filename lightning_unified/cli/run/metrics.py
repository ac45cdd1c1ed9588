"""Read a run's `metrics.csv` as curves, including files that a crash damaged."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Curve", "read_curves"]

_NO_METRIC = ("step", "epoch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A logged metric over optimizer steps; a value that was not finite is None.

    Attributes:
        steps: Logged steps, ascending.
        values: One value for each step.
    """

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def last(self) -> float | None:
        """The last finite value."""
        return next((value for value in reversed(self.values) if value is not None), None)


def read_curves(files: Iterable[Path]) -> dict[str, Curve]:
    """Return the columns of `files`, oldest first, each as one curve.

    Cells without a number are skipped.

    Where the steps of a column go back, a resumed run began. From that step on, its values replace the earlier part's.
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
    """Yield (step, column, value) of every cell with a number; the value is None if not finite."""
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
