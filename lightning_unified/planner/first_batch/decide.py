"""Decide how the step of a batch runs: a pure function from frozen inputs to a frozen plan.

`gather.py` reads the inputs from the run; `planning.py` applies the plan to it. Nothing here touches a module, a device or a policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Candidate, Choice, what_would_fit
from lightning_unified.errors import BudgetError, DryRunError
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.compared import is_under
from lightning_unified.units import format_bytes

__all__ = ["StepInputs", "StepPlan", "decide", "more_rows", "needs_search", "trusted"]

_SURE = 1.02  # predictions of live bytes are off by less; a step within this factor of the budget is tried, not refused


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """The values that the decision depends on.

    Attributes:
        combinations: The combinations of memory options that may run, the user's own first, with those of the candidates of `choice`.
        own: The prediction for the user's own combination at the size that was asked for.
        own_fits: Whether that step fits within `budget_bytes`.
        budget_bytes: Bytes of the budget that are left for the step.
        beside_bytes: Bytes of the budget that this process holds beside the step.
        rows: Rows of the whole batch; None for a batch without a row dimension.
        micro_batch_size: The largest micro-batch size that the user or memory pressure allows; None for the whole batch.
        module: The module's class name, for messages.
        may_try: Whether a plan that almost fits may be tried.
        obstacle: Why the batch cannot be split; empty if it can.
        choice: The result of a search; None if `needs_search` is false.
    """

    combinations: tuple[Combination, ...]
    own: Prediction
    own_fits: bool
    budget_bytes: int
    rows: int | None
    micro_batch_size: int | None
    module: str
    beside_bytes: int = 0
    may_try: bool = True
    obstacle: str = ""
    choice: Choice | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """How the step of a batch runs.

    Attributes:
        combination: The combination of memory options to apply.
        micro_batch_size: Rows of the largest micro-batch.
        num_micro_batches: The number of micro-batches.
        refused: The next larger micro-batch size, predicted not to fit; None if the sizes in use stay as they are.
        reason: Why, in words.
        candidate: The result of the search that this plan follows; None for the step as the user set it.
        alternatives: The other results of the search.
    """

    combination: Combination
    micro_batch_size: int
    num_micro_batches: int
    refused: int | None
    reason: str
    candidate: Candidate | None = None
    alternatives: tuple[Candidate, ...] = ()


def trusted(own: Prediction) -> Prediction:
    """Return the prediction if its confidence is not low.

    Raises:
        DryRunError: If values that the dry run made up may have decided a shape.
    """
    if own.confidence == "low":
        notes = "; ".join(own.notes)
        raise DryRunError(f"values that decide shapes were made up on the way{f' ({notes})' if notes else ''}")
    return own


def needs_search(inputs: StepInputs) -> bool:
    """Return whether another combination may be needed to fit, or may be faster.

    An optimizer kernel that is left open may be faster.
    """
    may_be_faster = len(inputs.combinations) > 1 and any(one.optimizer_kernel for one in inputs.combinations)
    return may_be_faster or not inputs.own_fits


def decide(inputs: StepInputs) -> StepPlan:
    """Return the plan of a step.

    It is the best of the search if there was one, else the step as the user set it. If the search found none that fits, it is the smallest,
    provided that it almost fits.

    Raises:
        BudgetError: If no plan fits and none may be tried.
    """
    choice = inputs.choice
    if choice is None:
        own = inputs.own
        return StepPlan(
            combination=inputs.combinations[0],
            micro_batch_size=own.rows,
            num_micro_batches=own.num_micro_batches,
            refused=_refused(inputs, own.rows, own.num_micro_batches),
            reason=f"fits: {format_bytes(own.within(inputs.budget_bytes).reserved_bytes)} of {format_bytes(inputs.budget_bytes)}",
        )
    best = choice.best or _smallest(choice, inputs)
    return StepPlan(
        combination=_combination_of(best, inputs.combinations),
        micro_batch_size=best.micro_batch_size,
        num_micro_batches=best.num_micro_batches,
        refused=_refused(inputs, best.micro_batch_size, best.num_micro_batches),
        reason=choice.reason,
        candidate=best,
        alternatives=choice.alternatives,
    )


def more_rows(rows: int, num_micro_batches: int) -> int:
    """Return the size of a micro-batch if `rows` are split into one micro-batch fewer."""
    return -(-rows // (num_micro_batches - 1))


def _combination_of(candidate: Candidate, compared: Sequence[Combination]) -> Combination:
    """Return the combination of a candidate."""
    return next(one for one in compared if is_under(one, candidate))


def _refused(inputs: StepInputs, micro_batch_size: int, num_micro_batches: int) -> int | None:
    """Return the next larger size if the plan is smaller than the sizes in use.

    The result is None if it is not.
    """
    is_smaller = inputs.micro_batch_size is None or micro_batch_size < inputs.micro_batch_size
    if inputs.rows is None or num_micro_batches == 1 or not is_smaller:
        return None
    return more_rows(inputs.rows, num_micro_batches)


def _smallest(choice: Choice, inputs: StepInputs) -> Candidate:
    """Return the candidate that needs the least memory, to be tried.

    Raises:
        BudgetError: If it cannot fit, or no plan may be tried.
    """
    least = min(choice.alternatives, key=lambda one: one.reserved_bytes)
    if not inputs.may_try or least.peak_bytes > _SURE * inputs.budget_bytes:
        raise BudgetError(_refusal(inputs, choice, needs=least.reserved_bytes))
    return least


def _refusal(inputs: StepInputs, choice: Choice, *, needs: int) -> str:
    left, beside = inputs.budget_bytes, inputs.beside_bytes
    given = f"{format_bytes(left)} of the budget are left for the step of {inputs.module}"
    if beside:
        rest = f"{format_bytes(left)} are left" if left > 0 else "nothing is left"
        given = (
            f"of the {format_bytes(left + beside)} that this process may use, it holds {format_bytes(beside)} beside the step of "
            f"{inputs.module}, and {rest}"
        )
    table = "\n".join(f"  {format_bytes(count)}: {plan}" for plan, count in what_would_fit(choice))
    whole = f"\nThe batch runs whole, because {inputs.obstacle}" if inputs.obstacle else ""
    return (
        f"no plan fits: {given}. The smallest plan needs {format_bytes(needs)}, so the least budget is {format_bytes(beside + needs)}. "
        f"What would fit:\n{table}{whole}"
    )
