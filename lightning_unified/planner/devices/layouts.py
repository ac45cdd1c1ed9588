"""Compare the layouts of a step on several devices: copies or shards, with and without activation checkpointing."""

from collections.abc import Callable, Sequence

from lightning_unified.cost_model.plan import Layout
from lightning_unified.cost_model.rates import Rates
from lightning_unified.errors import DryRunError
from lightning_unified.planner.combinations import Combination
from lightning_unified.planner.devices.group import STRATEGIES
from lightning_unified.planner.planner import Planner

__all__ = ["compared_layouts"]


def compared_layouts(
    planner_of: Callable[[str], Planner], combinations: Sequence[Combination], *, budget_bytes: int, rates: Rates
) -> tuple[Layout, ...]:
    """Return each layout with its fastest split that fits, or with its smallest one.

    Args:
        planner_of: Returns the planner of a strategy.
        combinations: The combinations of memory options that are allowed, the user's own first.
        budget_bytes: Bytes that a device may use.
        rates: The speeds of a device.
    """
    own = combinations[0]
    all_blocks = (one for one in combinations if one.recompute is not None and one.recompute.everything)
    shown = dict.fromkeys((own, *(one for one in all_blocks if _only_recomputes(one, own))))
    found = [
        _layout(strategy, planner_of(strategy), combination, budget_bytes=budget_bytes, rates=rates)
        for strategy in STRATEGIES
        for combination in shown
    ]
    return tuple(layout for layout in found if layout is not None)


def _only_recomputes(one: Combination, own: Combination) -> bool:
    """Return whether a combination differs from the user's own in nothing but the recomputed blocks."""
    policy = one.recompute
    same = (one.optimizer_kernel, one.loss_chunk, one.attention) == (own.optimizer_kernel, own.loss_chunk, own.attention)
    return same and policy is not None and not policy.keep_attention


def _layout(
    strategy: str, planner: Planner, combination: Combination, *, budget_bytes: int, rates: Rates
) -> Layout | None:
    try:
        choice = planner.choose([combination], budget_bytes=budget_bytes, rates=rates)
    except DryRunError:
        return None
    best = choice.best or choice.alternatives[0]
    found = planner.prediction_of(best)
    return Layout(
        strategy=strategy,
        recompute=best.recompute,
        micro_batch_size=best.micro_batch_size,
        parts=best.parts,
        peak_bytes=best.peak_bytes,
        reserved_bytes=best.reserved_bytes,
        seconds=best.seconds,
        link_seconds=found.link_seconds,
        fits=best.fits,
    )
