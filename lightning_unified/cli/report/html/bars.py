"""Bars: predicted peak by category, measured peak, and memory at each place of a step."""

from collections.abc import Iterable, Sequence
from html import escape

from lightning_unified.cli.report.html.charts import slug
from lightning_unified.cli.report.html.scale import amount
from lightning_unified.cli.report.html.tables import chip, instants
from lightning_unified.cli.report.run_directory.figures import (
    budget_bytes,
    categories,
    counts_process,
    measured_peak,
    number,
    peak_error,
    peak_source,
    predicted_peak,
    prediction,
)
from lightning_unified.cli.report.run_directory.records import Run

__all__ = ["instant_bars", "peak_bars"]

_MOST_INSTANTS = 24
_VISIBLE = 5  # runs share a scale up to this ratio of their largest sizes


def peak_bars(runs: Sequence[Run]) -> str:
    """Return each run's budget, predicted peak by category and measured peak.

    All of them share one scale on which they stay visible.
    """
    sizes = [_greatest(run) for run in runs]
    known = [size for size in sizes if size]
    if not known:
        return '<p class="unknown">unknown: neither a budget nor a peak was recorded</p>'
    shared = max(known) if max(known) <= _VISIBLE * min(known) else None
    groups = []
    for index, (run, size) in enumerate(zip(runs, sizes, strict=True)):
        name = f"<h3>{chip(index, run)}</h3>" if len(runs) > 1 else ""
        rows = "".join(_rows(run, shared or size or max(known)))
        groups.append(f'<div class="bars">{name}{rows}</div>')
    if shared is None:
        groups.append('<p class="note">The runs differ so much in size that each has its own scale.</p>')
    found = dict.fromkeys(name for run in runs for name in categories(run))
    legend = "".join(
        f'<li><i class="swatch band" style="--c:var(--{slug(name)})"></i>{escape(name)}</li>' for name in found
    )
    return f"{''.join(groups)}<ul class=legend>{legend}</ul>" if legend else "".join(groups)


def _greatest(run: Run) -> float | None:
    sizes = [budget_bytes(run), predicted_peak(run), measured_peak(run), number(prediction(run), "reserved_bytes")]
    sizes.append(number(prediction(run), "validation", "reserved_bytes"))
    return max((size for size in sizes if size is not None), default=None)


def _rows(run: Run, most: float) -> Iterable[str]:
    predicted, error = predicted_peak(run), peak_error(run)
    yield _row("budget", budget_bytes(run), most, color="budget")
    parts = categories(run)
    if parts and predicted:
        stack = "".join(
            f'<i style="width:{100 * size / most:.3f}%;background:var(--{slug(name)})" title="{escape(name)} {amount(size, "bytes")}"></i>'
            for name, size in parts.items()
        )
        size = amount(predicted, "bytes") + ("" if error is None else f" ({error:+.1%})")
        yield f'<div class="bar"><span>predicted peak</span><div class="track">{stack}</div><b>{size}</b></div>'
    else:
        yield _row("predicted peak", predicted, most, color="predicted")
    reserved = number(prediction(run), "reserved_bytes")
    if reserved is not None:
        yield _row("predicted, reserved", reserved, most, color="reserved")
    validation = number(prediction(run), "validation", "reserved_bytes")
    if validation is not None:
        yield _row("validation step, reserved", validation, most, color="reserved")
    yield _row("measured peak", measured_peak(run), most, color="peak", note=peak_source(run))
    if counts_process(run) and predicted is not None:
        yield '<p class="note">The measured peak is of the whole process: it includes Python and libraries, which the prediction does not.</p>'


def _row(label: str, size: float | None, most: float, *, color: str, note: str = "") -> str:
    bar = "" if size is None else f'<i style="width:{100 * size / most:.3f}%;background:var(--{color})"></i>'
    kind = ' class="unknown"' if size is None else ""
    why = f' title="{escape(note)}"' if note else ""
    return f'<div class="bar"{why}><span>{escape(label)}</span><div class="track">{bar}</div><b{kind}>{amount(size, "bytes")}</b></div>'


def instant_bars(run: Run) -> str:
    """Return the predicted memory at each place of a step, in order.

    If there are very many places, only the largest remain.
    """
    found = instants(run)
    if not found:
        return ""
    least = sorted((size for _, size in found), reverse=True)[:_MOST_INSTANTS][-1]
    shown = [(name, size) for name, size in found if size >= least][:_MOST_INSTANTS]
    most = max(size for _, size in shown) or 1.0
    rows = "".join(_row(name, size, most, color="peak" if size == most else "allocated") for name, size in shown)
    left_out = f", the largest {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    return f'<details><summary>How the peak comes about{left_out}</summary><div class="bars instants">{rows}</div></details>'
