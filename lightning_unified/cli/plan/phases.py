"""A fit of several phases, each with batches of its own: what it takes is what its largest phase takes."""

from collections.abc import Mapping
from dataclasses import replace

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.render import does_fit
from lightning_unified.units import format_bytes

__all__ = ["with_phases"]


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
