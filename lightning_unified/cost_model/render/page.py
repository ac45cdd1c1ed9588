"""Compose the page about a plan or a prediction."""

from collections.abc import Sequence

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render.facts import facts_of_plan, facts_of_prediction
from lightning_unified.cost_model.render.planned import MachinePlan, prediction_of
from lightning_unified.cost_model.render.sheet import Fact, Sheet, Table
from lightning_unified.cost_model.render.tables import (
    alternatives_table,
    categories_table,
    instants_table,
    layouts_table,
    machines_table,
)
from lightning_unified.hardware.environment.watermarks import Watermarks
from lightning_unified.units import format_duration

__all__ = ["sheet_of"]


def sheet_of(
    planned: Plan | Prediction,
    *,
    title: str = "Plan",
    facts: Sequence[tuple[str, str]] = (),
    watermarks: Watermarks | None = None,
    machines: Sequence[MachinePlan] = (),
    more: Sequence[Table] = (),
) -> Sheet:
    """Return the page, for any output format.

    Args:
        planned: A plan, or a prediction alone.
        title: Title in one line.
        facts: Names and texts shown first, such as the model's and the machine's.
        watermarks: Marks beside the budget; None shows the budget alone.
        machines: Plans on other machines, shown last.
        more: Tables shown before those of other machines.
    """
    prediction = prediction_of(planned)
    own = facts_of_prediction(planned) if isinstance(planned, Prediction) else facts_of_plan(planned)
    tables: list[Table] = []
    notes: tuple[str, ...] = ()
    if prediction is not None:
        budget = None if isinstance(planned, Prediction) else planned.budget_bytes
        tables.append(categories_table(prediction, budget_bytes=budget, watermarks=watermarks))
        tables += [instants_table(prediction)] if prediction.instants else []
        took = f"Predicted in {format_duration(prediction.planning_seconds)}." if prediction.planning_seconds else ""
        notes = (*prediction.notes, *([took] if took else []))
    if not isinstance(planned, Prediction) and planned.alternatives:
        tables.append(alternatives_table(planned))
    if not isinstance(planned, Prediction) and planned.layouts:
        tables.append(layouts_table(planned))
    tables += [*more, *([machines_table(machines)] if machines else [])]
    return Sheet(
        title=title,
        facts=(*(Fact(name=name, text=text) for name, text in facts), *own),
        tables=tuple(tables),
        notes=notes,
    )
