"""What is run where nothing is predicted to fit, and when that is refused."""

from lightning_unified.cost_model.search import Candidate, Choice, what_would_fit
from lightning_unified.errors import BudgetError
from lightning_unified.units import format_bytes

__all__ = ["smallest"]

_SURE = 1.02  # a prediction of what must live is not off by more; below that, the step is tried rather than refused


def smallest(choice: Choice, *, budget: int, whose: str, tries: bool = True) -> Candidate:
    """Return the plan that needs least, to be tried.

    Args:
        choice: Of which nothing fits.
        budget: Bytes that are left for the step.
        whose: The module's class.
        tries: Whether a plan is returned that could fit; else all are refused.

    Raises:
        BudgetError: If that plan cannot fit either, or none is to be tried.
    """
    least = min(choice.alternatives, key=lambda one: one.reserved_bytes)
    if not tries or least.peak_bytes > _SURE * budget:
        table = "\n".join(f"  {format_bytes(count)}: {what}" for what, count in what_would_fit(choice))
        raise BudgetError(
            f"no plan fits: {format_bytes(budget)} of the budget are left for the step of {whose}, and the smallest plan needs "
            f"{format_bytes(least.reserved_bytes)}. What would fit:\n{table}"
        )
    return least
