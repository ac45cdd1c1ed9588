"""Who plans: the functions that the command calls, so that tests can give others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Backend", "real_backend"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """What the command calls.

    Attributes:
        plan: `plan(module, batch, *, budget, device, rates=None, …) -> Plan`. One that does not fit comes back with alternatives none of
            which fits, and the prediction of the smallest.
        plan_many: `plan_many(module, batch, machines, …) -> dict[str, Plan]`, machines by name: (backend, budget in bytes, rates).
        rates: What is tabled of a machine, by its name; None where nothing is.
    """

    plan: Callable[..., Any]
    plan_many: Callable[..., Mapping[str, Any]]
    rates: Callable[[str], Any]


def real_backend() -> Backend:
    """Return the planner of this package."""
    from lightning_unified.planning.rates import tabled_rates  # pyright: ignore[reportMissingImports]
    from lightning_unified.training.predict import plan, plan_many  # pyright: ignore[reportMissingImports]

    return Backend(plan=plan, plan_many=plan_many, rates=tabled_rates)
