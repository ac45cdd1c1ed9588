"""Calls to the planner: the phases of a fit, and the same step on every simulated machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_unified.cli.plan.subject import Subject
from lightning_unified.cost_model import rates
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.render import MachinePlan, does_fit
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import Budget, resolve_budget
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from lightning_unified.planner import predict
from lightning_unified.precision import choose_precision, platform_of
from lightning_unified.units import format_bytes

__all__ = ["fits_where", "with_phases"]


def with_phases(plan: Plan, others: Mapping[str, Plan]) -> Plan:
    """Return the plan of the main phase, with the sizes of the other phases among its reasons.

    A fit plans again when the structure of its batches changes, so each phase has sizes of its own. If another phase does not fit,
    its plan is returned instead, because then the fit does not fit either.

    Args:
        plan: The plan of the main phase.
        others: The plans of the other phases, by name.
    """
    if not others:
        return plan
    worst = next((other for other in (plan, *others.values()) if not does_fit(other)), plan)
    words = "; ".join(f"{name}: {_phase_in_words(other)}" for name, other in others.items())
    return replace(worst, reasons={**worst.reasons, "other phases": words})


def _phase_in_words(plan: Plan) -> str:
    found = plan.prediction
    if found is None or not does_fit(plan):
        return "does not fit"
    split = "1 micro-batch of" if found.num_micro_batches == 1 else f"{found.num_micro_batches} micro-batches of up to"
    return f"{split} {found.rows} rows, {format_bytes(found.step_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """A simulated machine before a run: its entry on the page, and its precision ("" if it cannot run)."""

    entry: MachinePlan
    precision: str = ""


def fits_where(subject: Subject, *, precision: str, options: Mapping[str, Any]) -> tuple[MachinePlan, ...]:
    """Return the plan of each simulated machine with its own `auto` budget.

    Machines of one precision are planned together, so that they share their traces.

    Args:
        subject: The module, trainer and batch to plan.
        precision: The requested precision; `"auto"` is each machine's best.
        options: Passed to the planner for each machine.
    """
    several = options.get("devices", 1) > 1
    known = [_at_rest(name, precision, several=several) for name in PROFILES]
    plans: dict[str, Any] = {}
    for each in dict.fromkeys(machine.precision for machine in known if machine.precision):
        group = {
            machine.entry.name: (
                machine.entry.backend,
                budget,
                rates.tabled_rates(machine.entry.name),
            )
            for machine in known
            if machine.precision == each and (budget := machine.entry.budget_bytes) is not None
        }
        plans.update(predict.plan_many(subject.module, subject.batch, group, precision=each, **options))
    return tuple(replace(machine.entry, plan=plans.get(machine.entry.name)) for machine in known)


def _at_rest(name: str, precision: str, *, several: bool) -> _Machine:
    """Return a simulated machine before a run; `several` devices train together."""
    machine = SimulatedMachine(name)
    reading, profile = machine.reading(), machine.profile
    budget: Budget | None = None
    chosen, why_not = "", ""
    try:
        budget = resolve_budget("auto", reading)
        chosen = choose_precision(
            precision, platform=platform_of(torch.device(machine.device), sources=machine.sources)
        ).precision
    except ConfigurationError as error:
        why_not = str(error)
    if several and profile.backend == "mps":
        chosen, why_not = "", "Lightning trains on one device of type mps"
    entry = MachinePlan(
        name=name,
        backend=profile.backend,
        pool=reading.pool,
        budget_bytes=None if budget is None else budget.bytes,
        plan=None,
        why_not=why_not,
    )
    return _Machine(entry=entry, precision=chosen)
