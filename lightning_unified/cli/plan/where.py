"""What fits where: the same step on every simulated machine, each with its own `auto` budget."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_unified.cli.plan.backend import Backend
from lightning_unified.cli.plan.subject import Subject
from lightning_unified.cost_model.render import MachinePlan
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import Budget, resolve_budget
from lightning_unified.hardware.simulated import PROFILES, SimulatedMachine
from lightning_unified.precision import choose_precision, platform_of

__all__ = ["fits_where"]


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
