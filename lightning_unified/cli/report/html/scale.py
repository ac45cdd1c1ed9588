"""Axes and values: round ticks, and numbers with their unit."""

import math
from itertools import pairwise

from lightning_unified.units import GIB, KIB, MIB, format_bytes, format_duration

__all__ = ["Unit", "amount", "labels", "ticks"]

Unit = str
"""`"bytes"`, `"seconds"`, `"rows"`, `"count"` or `""` (a plain number)."""

_BYTES = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_TIMES = ((7200.0, "h"), (120.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_STEPS = (1, 2, 2.5, 5, 10)


def ticks(low: float, high: float, *, unit: Unit = "", most: int = 6, whole: bool = False) -> list[float]:
    """Return at most `most` round values from `low` to `high`.

    Bytes are round in the unit of their labels.
    """
    if not high > low:
        return [low]
    base = next((size for size in (GIB, MIB, KIB) if high >= size), 1) if unit == "bytes" else 1
    span = (high - low) / base
    scale = 10.0 ** math.floor(math.log10(span / most))
    step = next(each * scale for each in _STEPS if span / (each * scale) <= most - 1 or each == 10)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / base / step - 1e-9)
    last = math.floor(high / base / step + 1e-9)
    return [index * step * base for index in range(first, last + 1)]


def labels(values: list[float], unit: Unit = "") -> list[str]:
    """Return the labels of ticks, all in one unit and with enough digits to differ."""
    most = max(map(abs, values), default=0.0)
    size, name = 1.0, f" {unit}" if unit == "rows" else ""
    if unit == "bytes":
        size, name = next(((size, f" {name}") for size, name in _BYTES if most >= size), (1.0, " B"))
    elif unit == "seconds":
        size, name = next(((size, f" {name}") for size, name in _TIMES if most >= size), (1.0, " s"))
    shown = [value / size for value in values]
    gap = min((b - a for a, b in pairwise(shown)), default=0.0) or max(map(abs, shown), default=1.0) or 1.0
    if max(map(abs, shown), default=0.0) >= 1e6 or gap < 1e-5:
        return [f"{value:.3g}{name}" for value in shown]
    digits = next(
        each for each in range(7) if each == 6 or (gap * 10**each > 0.99 and abs(gap * 10**each % 1 - 0.5) > 0.49)
    )
    return [f"{value:,.{digits}f}{name}" for value in shown]


def amount(value: float | None, unit: Unit = "") -> str:
    """Return a value with its unit, `"unknown"` for None."""
    if value is None:
        return "unknown"
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "seconds":
        return format_duration(value)
    text = f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else _significant(value)
    return f"{text} rows" if unit == "rows" else text


def _significant(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 6)}f}"
