"""Tables of a plan: the peak by category and by place, alternatives, and plans on other machines."""

from collections.abc import Sequence
from itertools import accumulate

from lightning_unified.cost_model.generation import Generated
from lightning_unified.cost_model.plan import Layout, Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.facts import format_share
from lightning_unified.cost_model.render.planned import (
    MachinePlan,
    does_fit,
    is_chosen,
    least_bytes,
    phase_of,
    recomputed,
)
from lightning_unified.cost_model.render.sheet import Bars, Table
from lightning_unified.cost_model.search import Candidate
from lightning_unified.cost_model.trace.trace import CATEGORIES
from lightning_unified.hardware.environment.watermarks import Watermarks
from lightning_unified.units import format_bytes, format_duration

__all__ = [
    "alternatives_table",
    "categories_table",
    "generation_table",
    "instants_table",
    "layouts_table",
    "machines_table",
    "ordered",
]

_FAR = 6  # a budget this many times the need would make the bars too short to read
_MOST_INSTANTS = 12
_MOST_ALTERNATIVES = 16
_CHOSEN, _FITS, _TORCHS = "→", "yes", "torch"
_NUMBERS = ("rows", "loss chunk", "peak", "allocator", "step")
_ALTERNATIVES = (
    "", "rows", "recompute", "precision", "optimizer", "loss chunk", "attention", "peak", "allocator", "step", "fits"
)  # fmt: skip


def ordered(prediction: Prediction) -> list[tuple[str, int]]:
    """Return the non-empty categories in the order in which a step creates them."""
    known = [(name, prediction.categories[name]) for name in CATEGORIES if prediction.categories.get(name)]
    return known + [(name, count) for name, count in prediction.categories.items() if name not in CATEGORIES and count]


def categories_table(
    prediction: Prediction, *, budget_bytes: int | None = None, watermarks: Watermarks | None = None
) -> Table:
    """Return the peak by category, stacked up to the reserved bytes and compared with the budget."""
    parts = ordered(prediction)
    ends = list(accumulate(count for _, count in parts))
    spans = [(end - count, end) for (_, count), end in zip(parts, ends, strict=True)]
    compared = [("peak of tensors", prediction.peak_bytes), ("reserved by the allocator", prediction.reserved_bytes)]
    if prediction.generation_bytes:
        compared.append(("generation before it", prediction.generation_bytes))
    if prediction.validation is not None:
        compared.append(("validation step", prediction.validation.reserved_bytes))
    if budget_bytes is not None:
        compared.append(("budget", budget_bytes))
    rows = [(name, format_bytes(count), format_share(count / max(prediction.peak_bytes, 1))) for name, count in parts]
    rows += [
        (name, format_bytes(count), format_share(count / max(prediction.peak_bytes, 1))) for name, count in compared
    ]
    need = max(1, *(count for name, count in compared if name != "budget"))
    scale = need if budget_bytes is None or budget_bytes > _FAR * need else max(need, budget_bytes)
    marks = () if watermarks is None else tuple(sorted({watermarks.low, watermarks.high}))
    every = [*spans, *((0, count) for _, count in compared)]
    return Table(
        title="Peak by category",
        columns=("category", "bytes", "of the peak"),
        rows=tuple(rows),
        numbers=frozenset({1, 2}),
        strong=frozenset({len(parts)}),
        faint=frozenset(range(len(parts) + 1, len(rows))),
        bars=Bars(
            spans=tuple((min(start / scale, 1.0), min(end / scale, 1.0)) for start, end in every),
            marks=tuple(mark / scale for mark in marks if mark <= scale),
            title=f"0 to {format_bytes(scale)}",
        ),
        remark=_remark(watermarks, scale),
    )


def _remark(watermarks: Watermarks | None, scale: int) -> str:
    if watermarks is None:
        return ""
    marks = f"Caches are cleared from {format_bytes(watermarks.low)} on; the allocator's cap is {format_bytes(watermarks.high)}."
    return marks if watermarks.low <= scale else f"{marks} Both lie beyond the bars."


def generation_table(found: Generated, *, budget_bytes: int) -> Table:
    """Return the peak of a generation by category, compared with the budget."""
    taken = found.bytes
    cache = "keys and values" + ", with the copy of a growing cache" * found.grows
    named = [("weights", taken.weights), (cache, taken.cache), ("logits", taken.logits)]
    named += [("pass over the prompt", taken.prompt), ("peak", taken.peak_bytes), ("budget", budget_bytes)]
    scale = max(taken.peak_bytes, budget_bytes if budget_bytes <= _FAR * taken.peak_bytes else 0)
    rows = f"{found.rows} row{'s' * (found.rows != 1)} of {found.prompt} + {found.new} tokens"
    verdict = "" if taken.peak_bytes <= budget_bytes else " It does not fit."
    return Table(
        title=f"Generation by {found.network}: {rows}",
        columns=("category", "bytes", "of the peak"),
        rows=tuple((name, format_bytes(count), format_share(count / taken.peak_bytes)) for name, count in named),
        numbers=frozenset({1, 2}),
        strong=frozenset({4}),
        faint=frozenset({5}),
        bars=Bars(
            spans=tuple((0.0, min(count / scale, 1.0)) for _, count in named), title=f"0 to {format_bytes(scale)}"
        ),
        remark=f"By formula, for generating alone; of logits and the pass over the prompt, only the larger lives at the peak.{verdict}",
    )


def instants_table(prediction: Prediction) -> Table:
    """Return the peak of each phase and the highest other places, in the order of the step."""
    places = list(enumerate(prediction.instants))
    ranked = sorted(places, key=lambda place: -place[1][1])
    of_phases = list({phase_of(words): (at, (words, count)) for at, (words, count) in reversed(ranked)}.values())
    shown = sorted([*of_phases, *(place for place in ranked if place not in of_phases)][:_MOST_INSTANTS])
    most = max((count for _, (_, count) in shown), default=1) or 1
    left = len(places) - len(shown)
    return Table(
        title="Peak by place, in the order of the step",
        columns=("place", "bytes", "of the peak"),
        rows=tuple((words, format_bytes(count), format_share(count / most)) for _, (words, count) in shown),
        numbers=frozenset({1, 2}),
        strong=frozenset(at for at, (_, (_, count)) in enumerate(shown) if count == most),
        bars=Bars(spans=tuple((0.0, count / most) for _, (_, count) in shown), title=f"0 to {format_bytes(most)}"),
        remark=f"{left} lower places are left out." if left > 0 else "",
    )


def alternatives_table(plan: Plan) -> Table:
    """Return the alternatives: fitting ones, fastest first, then the others by their excess bytes."""
    ranked = sorted(plan.alternatives, key=_rank)
    shown = [each for at, each in enumerate(ranked) if at < _MOST_ALTERNATIVES or is_chosen(each, plan)]
    rows = [_alternative_row(each, plan) for each in shown]
    if does_fit(plan) and plan.prediction is not None and not any(row[0] for row in rows):
        rows.insert(0, _chosen_row(plan, plan.prediction))
    left = len(ranked) - len(shown)
    columns, rows = _without_plain_attention(rows)
    return Table(
        title="Alternatives" if does_fit(plan) else "Memory each plan needs",
        columns=columns,
        rows=tuple(rows),
        numbers=frozenset(at for at, name in enumerate(columns) if name in _NUMBERS),
        strong=frozenset(at for at, row in enumerate(rows) if row[0]),
        faint=frozenset(at for at, row in enumerate(rows) if row[-1] != _FITS),
        remark=f"{left} more were compared." if left > 0 else "",
    )


def layouts_table(plan: Plan) -> Table:
    """Return the layouts of a step on several devices, with the fastest that fits marked."""
    best = min((each.seconds for each in plan.layouts if each.fits), default=None)
    rows = tuple(_layout_row(each, plan, is_best=each.fits and each.seconds == best) for each in plan.layouts)
    return Table(
        title=f"{plan.devices} devices: copies or shards",
        columns=("", "strategy", "hold", "recompute", "rows", "peak", "allocator", "link", "step", "fits"),
        rows=rows,
        numbers=frozenset({4, 5, 6, 7, 8}),
        strong=frozenset(at for at, row in enumerate(rows) if row[0]),
        faint=frozenset(at for at, row in enumerate(rows) if row[-1] != _FITS),
        remark="All figures are of one device. With hold=shards the link works while the device computes, as far as it can; else before and after.",
    )


def _layout_row(each: Layout, plan: Plan, *, is_best: bool) -> tuple[str, ...]:
    return (
        _CHOSEN if is_best else "",
        each.strategy,
        each.hold,
        each.recompute,
        f"{each.micro_batch_size} × {each.num_micro_batches}",
        format_bytes(each.peak_bytes),
        format_bytes(each.reserved_bytes),
        "" if each.link_seconds is None else format_duration(each.link_seconds),
        format_duration(each.seconds),
        _FITS if each.fits else f"no, {format_bytes(max(each.reserved_bytes - plan.budget_bytes, 0))} over",
    )


def _without_plain_attention(rows: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows, without the column of attention if it is torch's in every row."""
    at = _ALTERNATIVES.index("attention")
    if any(row[at] != _TORCHS for row in rows):
        return _ALTERNATIVES, rows
    return _ALTERNATIVES[:at] + _ALTERNATIVES[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]


def _alternative_row(each: Candidate, plan: Plan) -> tuple[str, ...]:
    return (
        _CHOSEN if is_chosen(each, plan) else "",
        f"{each.micro_batch_size} × {each.num_micro_batches}",
        each.recompute,
        *_memory_options(each),
        format_bytes(each.peak_bytes),
        format_bytes(each.reserved_bytes),
        format_duration(each.seconds),
        _FITS if each.fits else f"no, {format_bytes(max(each.reserved_bytes - plan.budget_bytes, 0))} over",
    )


def _chosen_row(plan: Plan, prediction: Prediction) -> tuple[str, ...]:
    """Return the row of the plan itself, for a planner whose alternatives do not include it."""
    return (
        _CHOSEN,
        f"{prediction.rows} × {prediction.num_micro_batches}",
        recomputed(plan),
        *_memory_options(plan),
        format_bytes(prediction.peak_bytes),
        format_bytes(prediction.reserved_bytes),
        format_duration(prediction.seconds),
        _FITS,
    )


def _memory_options(one: Candidate | Plan) -> tuple[str, str, str, str]:
    chunk = "whole" if one.loss_chunk is None else str(one.loss_chunk)
    return one.precision, one.optimizer_kernel or "as given", chunk, one.attention or _TORCHS


def _rank(each: Candidate) -> tuple[bool, float, int]:
    return (not each.fits, each.seconds if each.fits else 0.0, each.reserved_bytes)


def machines_table(machines: Sequence[MachinePlan]) -> Table:
    """Return the plan of each machine under its own `auto` budget, or why there is none."""
    rows = tuple(_machine_row(machine) for machine in machines)
    return Table(
        title="Plans on other machines",
        columns=(
            "machine",
            "pool",
            "budget",
            "fits",
            "rows",
            "recompute",
            "precision",
            "peak",
            "allocator",
            "step",
            "why not",
        ),
        rows=rows,
        numbers=frozenset({2, 4, 7, 8, 9}),
        faint=frozenset(at for at, row in enumerate(rows) if row[3] == "no"),
        remark="Simulated machines at rest, each with its auto budget. Step times are tabled, not measured.",
    )


def _machine_row(machine: MachinePlan) -> tuple[str, ...]:
    plan = machine.plan
    head = (machine.name, f"{machine.backend}, {machine.pool}", format_bytes(machine.budget_bytes))
    prediction = None if plan is None else plan.prediction
    if plan is None or prediction is None:
        least = None if plan is None else least_bytes(plan)
        why_not = machine.why_not or ("" if least is None else f"the smallest step needs {format_bytes(least)}")
        return (*head, "no" if why_not else "unknown", "", "", "", "", "", "", why_not)
    return (
        *head,
        _FITS if does_fit(plan) else "no",
        f"{prediction.rows} × {prediction.num_micro_batches}",
        recomputed(plan),
        plan.precision,
        format_bytes(prediction.peak_bytes),
        format_bytes(prediction.reserved_bytes),
        format_duration(prediction.seconds),
        "",
    )
