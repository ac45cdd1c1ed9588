"""What fits where: the same step on every simulated machine, each with its own `auto` budget."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_unified.cli.plan.subject import Subject
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.render import MachinePlan, does_fit
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import Budget, resolve_budget
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from lightning_unified.precision import choose_precision, platform_of
from lightning_unified.units import format_bytes

__all__ = ["Backend", "fits_where", "real_backend", "with_phases"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """What the command calls.

    Attributes:
        plan: As `training.predict.plan`.
        plan_many: As `training.predict.plan_many`.
        rates: What is tabled of a machine, by its name; None where nothing is.
    """

    plan: "Callable[..., Plan]"
    plan_many: "Callable[..., Mapping[str, Plan]]"
    rates: Callable[[str], Any]


def real_backend() -> Backend:
    """Return the planner of this package."""
    from lightning_unified.cost_model.rates import tabled_rates
    from lightning_unified.planner.predict import plan, plan_many

    return Backend(plan=plan, plan_many=plan_many, rates=tabled_rates)


def with_phases(plan: Plan, others: Mapping[str, Plan]) -> Plan:
    """Return the plan of the fit's main phase with what is to be known of the others.

    A fit plans anew when its batches become others, so each phase has sizes of its own. Of phases that all fit the main one is shown;
    one that does not fit is shown in its place, for then neither does the fit.

    Args:
        plan: Of the main phase.
        others: Of the others, by name.
    """
    if not others:
        return plan
    worst = next((other for other in (plan, *others.values()) if not does_fit(other)), plan)
    words = "; ".join(f"{name}: {_told(other)}" for name, other in others.items())
    return replace(worst, reasons={**worst.reasons, "other phases": words})


def _told(plan: Plan) -> str:
    found = plan.prediction
    if found is None or not does_fit(plan):
        return "does not fit"
    return f"{found.rows} × {found.parts} rows, {format_bytes(found.step_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """A simulated machine at rest: what it is, what it may use, what it computes in, or why it cannot."""

    entry: MachinePlan
    precision: str = ""


def fits_where(
    subject: Subject,
    *,
    backend: Backend,
    precision: str,
    options: Mapping[str, Any],
    machines: Iterable[str] = tuple(PROFILES),
) -> tuple[MachinePlan, ...]:
    """Return what each machine would do.

    Machines that compute in one precision are planned together, so that they share their traces.

    Args:
        subject: What is planned.
        backend: Who plans.
        precision: As asked for; `"auto"` is what each machine does best.
        options: Passed to the planner for each.
        machines: Names of simulated machines.
    """
    known = [_at_rest(name, precision) for name in machines]
    plans: dict[str, Any] = {}
    for each in dict.fromkeys(machine.precision for machine in known if machine.precision):
        group = {
            machine.entry.name: (machine.entry.backend, machine.entry.budget_bytes, backend.rates(machine.entry.name))
            for machine in known
            if machine.precision == each
        }
        plans.update(backend.plan_many(subject.module, subject.batch, group, precision=each, **options))
    return tuple(replace(machine.entry, plan=plans.get(machine.entry.name)) for machine in known)


def _at_rest(name: str, precision: str) -> _Machine:
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
    entry = MachinePlan(
        name=name,
        backend=profile.backend,
        pool=reading.pool,
        budget_bytes=None if budget is None else budget.bytes,
        plan=None,
        why_not=why_not,
    )
    return _Machine(entry=entry, precision=chosen)
