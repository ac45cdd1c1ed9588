"""The plan of a step from the choice of a search."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.search import Choice
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.other_phases import with_generation
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner

__all__ = ["chosen_plan"]


def chosen_plan(
    planner: Planner,
    combinations: Sequence[Combination],
    step: StepSpec,
    *,
    rates: Rates,
    budget_bytes: int,
    only_best: bool = False,
) -> Plan:
    """Return the plan of a step, with the memory of the generation before it.

    As in a run, CUDA's segments expand if the batch does not fit as the user set it. The arguments are those of `Planner.choose`.
    """
    if planner.may_expand(limit=budget_bytes) and not planner.fits_whole(combinations[0], limit=budget_bytes):
        planner.expand_segments()
    choice = planner.choose(combinations, budget_bytes=budget_bytes, rates=rates, only_best=only_best)
    found = _plan(planner, choice, precision=step.precision, budget_bytes=budget_bytes)
    if found.prediction is None:
        return found
    prediction, reason = with_generation(found.prediction, step.module, step.batch, precision=found.precision)
    reasons = {**found.reasons, **({"generation": reason} if reason else {})}
    return replace(found, prediction=prediction, reasons=reasons)


def _plan(planner: Planner, choice: Choice, *, precision: str, budget_bytes: int) -> Plan:
    best = choice.best
    if best is None:
        return Plan(
            micro_batch_size=None,
            recompute=None,
            precision=precision,
            budget_bytes=budget_bytes,
            alternatives=choice.alternatives,
            reasons={"micro_batch_size": choice.reason},
        )
    combination = planner.combination_of(best)
    return Plan(
        micro_batch_size=best.micro_batch_size,
        recompute=combination.recomputes,
        recomputed=best.recompute,
        precision=precision,
        optimizer_kernel=best.optimizer_kernel,
        loss_chunk=best.loss_chunk,
        attention=best.attention,
        budget_bytes=budget_bytes,
        prediction=planner.prediction_of(best),
        alternatives=choice.alternatives,
        reasons={"micro_batch_size": choice.reason},
    )
