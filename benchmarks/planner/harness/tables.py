"""Figures of error and their tables."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["errors_of", "gib", "percent", "quantile", "spread", "table"]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(max(-int(-share * len(ordered) // 1) - 1, 0), len(ordered) - 1)]


def errors_of(
    rows: Sequence[dict[str, Any]], said: Callable[[dict], float | None], true: Callable[[dict], float | None]
) -> list[float]:
    """Return what was said over what is true, less one, of the rows that have both."""
    pairs = [(said(row), true(row)) for row in rows]
    return [one / other - 1 for one, other in pairs if one is not None and other]


def spread(found: Sequence[float]) -> dict[str, Any]:
    """Return the figures by which a predictor is judged; None without cells."""
    if not found:
        names = ("median", "median_absolute", "p95_absolute", "worst", "worst_absolute", "under", "under_by_1_percent")
        return dict.fromkeys(names)
    sizes = [abs(one) for one in found]
    return {
        "median": statistics.median(found),
        "median_absolute": statistics.median(sizes),
        "p95_absolute": quantile(sizes, 0.95),
        "worst": max(found, key=abs),
        "worst_absolute": max(sizes),
        "under": sum(one < 0 for one in found) / len(found),
        "under_by_1_percent": sum(one < -0.01 for one in found) / len(found),
    }


def percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:+.2f} %" if signed else f"{100 * value:.2f} %"


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.3g}"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; None is a dash."""
    lines = [heads, ["---"] * len(heads), *[["–" if one is None else str(one) for one in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
