"""A record for reading in a terminal: each measure as a table of methods by budgets, and where intervals are apart."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

__all__ = ["tables"]

_SHOWN = (
    ("dropped_cross_entropy", "Cross-entropy of dropped tokens, nats per token (lower is better)"),
    ("continuation_perplexity", "Perplexity of the continuation after the compressed text (lower is better)"),
    ("rouge_l", "ROUGE-L of the greedy reconstruction (higher is better)"),
)
_NATS = {"continuation_perplexity": "continuation_cross_entropy"}  # what is compared for what is shown
_MARKS = {"policy": " ▲", "baseline": " ▼", "overlap": "", "unknown": ""}


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the tables of a record; ▲ and ▼ mark baselines whose interval the policy's is clear of, ahead or behind."""
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
