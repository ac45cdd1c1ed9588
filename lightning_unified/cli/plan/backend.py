"""Who plans: the functions that the command calls, so that tests can give others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported when there is something to plan
    from lightning_unified.cost_model.plan import Plan

__all__ = ["Backend", "real_backend"]


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
