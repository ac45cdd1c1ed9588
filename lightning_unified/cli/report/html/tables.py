"""Tables of a page: figures of runs, plans with alternatives, events, and environments."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from lightning_unified.cli.report.html.scale import amount
from lightning_unified.cli.report.run_directory.figures import (
    alternatives,
    at,
    budget_bytes,
    counts_process,
    measured_peak,
    micro_batch_size,
    number,
    peak_error,
    peak_source,
    predicted_peak,
    prediction,
    recoveries,
    validation_loss,
)
from lightning_unified.cli.report.run_directory.records import Moment, Run

__all__ = [
    "alternatives_table",
    "chip",
    "environment",
    "facts",
    "instants",
    "moments_table",
    "reasons_table",
    "table",
    "text_of",
]

_MOST_MOMENTS = 200
_OF_PLAN = ("reasons", "events", "prediction", "alternatives", "predicted_peak_bytes", "strategy")
_ALTERNATIVE = (
    ("micro_batch_size", "micro-batch", ""),
    ("recompute", "recomputed", ""),
    ("precision", "precision", ""),
    ("optimizer_kernel", "optimizer", ""),
    ("loss_chunk", "loss chunk", ""),
    ("attention", "attention", ""),
    ("peak_bytes", "peak", "bytes"),
    ("reserved_bytes", "reserved", "bytes"),
    ("seconds", "a step", "seconds"),
    ("fits", "fits", ""),
)


def text_of(value: Any) -> str:
    """Return a value as YAML writes it: true, false, null, lists in brackets."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Return a table of HTML cells; wide tables scroll sideways.

    The first cell of a row is its heading.
    """
    body = "".join(
        f"<tr><th scope=row>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows
    )
    top = f"<thead><tr>{''.join(f'<th scope=col>{cell}</th>' for cell in head)}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def chip(index: int, run: Run) -> str:
    """Return the name of a run in its color."""
    return f'<b class="chip" style="--c:var(--run-{index % 8})">{escape(run.name)}</b>'


def facts(run: Run) -> dict[str, str]:
    """Return the compared figures of a run as text, `"unknown"` where missing."""
    summary, peak, budget, error = run.summary, measured_peak(run), budget_bytes(run), peak_error(run)
    part = f", {peak / budget:.0%} of the budget" if peak is not None and budget else ""
    rows, whole = micro_batch_size(run), number(summary, "effective_batch_size")
    whole = number(run.config, "data", "batch_size") if whole is None else whole
    return {
        "model": _words(
            at(summary, "model") or at(run.config, "name"), amount_of(summary, "parameters", "{} parameters")
        ),
        "device": _words(at(summary, "device") or at(run.machine, "device"), at(run.machine, "name")),
        "budget": amount(budget, "bytes"),
        "peak, measured": f"{amount(peak, 'bytes')}{part}",
        "peak, predicted": amount(predicted_peak(run), "bytes") + _error(run, error),
        "micro-batch": f"{amount(rows)} of {amount(whole)} rows" if rows is not None else "unknown",
        "recoveries": amount(recoveries(run)),
        "precision": _words(at(summary, "precision") or at(run.plan, "precision")),
        "recomputation": _yes(
            next((each for each in (at(summary, "recompute"), at(run.plan, "recompute")) if each is not None), None)
        ),
        "validation loss": amount(validation_loss(run)),
        "samples per second": amount(number(summary, "samples_per_second")),
        "tokens per second": amount(number(summary, "tokens_per_second")),
        "training took": amount(number(summary, "seconds"), "seconds"),
    }


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, "unknown") if isinstance(value, bool) else "unknown"


def amount_of(content: Any, key: str, form: str) -> str | None:
    """Return a number of `content` formatted by `form`, None if unknown."""
    value = number(content, key)
    return None if value is None else form.format(amount(value))


def _error(run: Run, error: float | None) -> str:
    if error is not None:
        return f", {abs(error):.1%} {'above' if error > 0 else 'below'} the measured"
    if predicted_peak(run) is not None and counts_process(run):
        return f"; the measured counts the whole process ({peak_source(run) or 'resident bytes'})"
    return ""


def _words(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part) or "unknown"


def reasons_table(run: Run) -> str:
    """Return the plan's decisions with their reasons."""
    reasons = at(run.plan, "reasons")
    reasons = reasons if isinstance(reasons, Mapping) else {}
    decided = {
        key: value for key, value in run.plan.items() if key not in _OF_PLAN and not isinstance(value, (dict, list))
    }
    names = list(dict.fromkeys([*decided, *reasons]))
    rows = []
    for name in names:
        value = decided.get(name)
        shown = "" if name not in decided else amount(value, "bytes") if name.endswith("_bytes") else text_of(value)
        if name == "budget_bytes" and "budget" in reasons:
            continue
        if name == "budget":
            shown = amount(budget_bytes(run), "bytes")
        rows.append((escape(name.replace("_", " ")), escape(shown), escape(str(reasons.get(name, "")))))
    return table(("decision", "", "why"), rows, kind="reasons") if rows else unknown("there is no readable plan.json")


def alternatives_table(run: Run) -> str:
    """Return the alternatives of the plan, the chosen one bold; empty without any."""
    weighed = alternatives(run)
    if not weighed:
        return ""
    columns = [column for column in _ALTERNATIVE if any(each.get(column[0]) is not None for each in weighed)]
    chosen, rows = _chosen(run, weighed), []
    for each in weighed:
        cells = [escape(_cell(each.get(key), unit)) for key, _, unit in columns]
        rows.append([f"<b>{cell}</b>" if each is chosen else cell for cell in cells])
    return f"<h4>Alternatives</h4>{table([name for _, name, _ in columns], rows, kind='numbers')}"


def _chosen(run: Run, weighed: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the chosen alternative: the one with the predicted size and peak.

    A recovery may have left a smaller size than predicted.
    """
    rows, peak = number(prediction(run), "rows"), predicted_peak(run)
    rows = number(run.plan, "micro_batch_size") if rows is None else rows
    alike = [
        each
        for each in weighed
        if each.get("fits") is not False
        and number(each, "micro_batch_size") == rows
        and each.get("precision") in (None, run.plan.get("precision"))
    ]
    return min(alike, key=lambda each: abs((number(each, "peak_bytes") or 0) - (peak or 0)), default=None)


def _cell(value: Any, unit: str) -> str:
    if unit:
        return amount(value, unit)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(member)}" for key, member in value.items())
    return "default" if value is None else text_of(value)


def instants(run: Run) -> list[tuple[str, float]]:
    """Return the predicted memory at each place of a step, in order."""
    found = at(prediction(run), "instants")
    pairs = (
        [each for each in found if isinstance(each, (list, tuple)) and len(each) == 2]
        if isinstance(found, list)
        else []
    )
    return [(str(name), size) for name, size in pairs if isinstance(size, (int, float))]


def moments_table(run: Run) -> str:
    """Return a table of events, newest last; of very many the first and the last."""
    events = run.moments
    if not events:
        return unknown("no events were recorded: events.jsonl and pressure.jsonl are missing")
    rest = len(events) - _MOST_MOMENTS
    shown = events if rest <= 0 else [*events[: _MOST_MOMENTS // 4], *events[-_MOST_MOMENTS * 3 // 4 :]]
    since = next((moment.time for moment in events if moment.time), None)
    rows = [
        (
            "" if moment.step is None else f"{moment.step:,}",
            escape(_after(since, moment)),
            f'<span class="kind {moment.kind}">{moment.kind}</span>',
            escape(moment.text),
        )
        for moment in shown
    ]
    left_out = f"<p class=note>{rest:,} events in between are left out.</p>" if rest > 0 else ""
    return table(("step", "after", "", "event"), rows, kind="moments") + left_out


def _after(since: str | None, moment: Moment) -> str:
    try:
        passed = datetime.fromisoformat(moment.time or "") - datetime.fromisoformat(since or "")
    except (ValueError, TypeError):
        return ""
    return amount(max(0.0, passed.total_seconds()), "seconds") if passed.total_seconds() >= 0.001 else "0 s"


def environment(run: Run) -> dict[str, str]:
    """Return the machine of a run, and the versions of its packages."""
    machine = run.machine
    versions = at(machine, "versions") or at(run.summary, "versions")
    named = {
        "system": _words(at(machine, "system")),
        "device": _words(at(machine, "device") or at(run.summary, "device"), at(machine, "name")),
        "pool": _words(at(machine, "pool") or at(run.summary, "pool"), _total(machine)),
        "processes": text_of(at(machine, "processes")) if machine else "unknown",
    }
    shown = {str(name): "not installed" if value is None else str(value) for name, value in (versions or {}).items()}
    return named | shown


def _total(machine: Mapping[str, Any]) -> str | None:
    total = number(machine, "total_bytes")
    return None if total is None else amount(total, "bytes")


def unknown(why: str) -> str:
    """Return the text for a missing section."""
    return f'<p class="unknown">unknown: {escape(why)}</p>'
