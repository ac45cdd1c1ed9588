"""Compare the layouts of a step on several devices: copies or shards."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_unified.cost_model.plan import Layout
from lightning_unified.cost_model.rates import Rates
from lightning_unified.errors import DryRunError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.units import format_duration

__all__ = ["best_layout", "compared_layouts", "why_layout"]


def compared_layouts(
    planners: Sequence[tuple[str, str, Planner]],
    own: Combination,
    *,
    policies: Sequence[RecomputePolicy],
    budget_bytes: int,
    rates: Rates,
) -> tuple[Layout, ...]:
    """Return each layout with its fastest split that fits, or with its smallest one.

    Args:
        planners: Each strategy with what its ranks hold whole during a step, and its planner.
        own: The user's own combination of memory options.
        policies: The policies of the module's blocks, from the least to the most recomputation.
        budget_bytes: Bytes that a device may use.
        rates: The speeds of a device.
    """
    shown = [replace(own, recompute=policy) for policy in dict.fromkeys((policies[0], policies[-1]))]
    found = [
        _layout(strategy, hold, planner, combination, budget_bytes=budget_bytes, rates=rates)
        for strategy, hold, planner in planners
        for combination in shown
    ]
    return tuple(layout for layout in found if layout is not None)


def best_layout(layouts: Sequence[Layout]) -> Layout | None:
    """Return the fastest layout that fits; of equally fast ones, the one that needs less memory."""
    fitting = [layout for layout in layouts if layout.fits]
    return min(fitting, key=lambda layout: (layout.seconds, layout.reserved_bytes), default=None)


def why_layout(layouts: Sequence[Layout], *, strategy: str, hold: str) -> str:
    """Return how a strategy compares with the others, in words."""
    best = best_layout(layouts)
    if best is None:
        return "nothing fits under either strategy"
    words = f"{best.strategy}{f' with hold={best.hold}' * bool(best.hold)}, activation checkpointing: {best.recompute}"
    if (best.strategy, best.hold) == (strategy, hold):
        return f"the fastest that fits is {words}, {format_duration(best.seconds)} a step"
    return f"{words} fits as well and is predicted faster, {format_duration(best.seconds)} a step"


def _layout(
    strategy: str, hold: str, planner: Planner, combination: Combination, *, budget_bytes: int, rates: Rates
) -> Layout | None:
    try:
        choice = planner.choose([combination], budget_bytes=budget_bytes, rates=rates)
    except DryRunError:
        return None
    best = choice.best or choice.alternatives[0]
    found = planner.prediction_of(best)
    return Layout(
        strategy=strategy,
        hold=hold,
        recompute=best.recompute,
        micro_batch_size=best.micro_batch_size,
        num_micro_batches=best.num_micro_batches,
        peak_bytes=best.peak_bytes,
        reserved_bytes=best.reserved_bytes,
        seconds=best.seconds,
        link_seconds=found.link_seconds,
        fits=best.fits,
    )
