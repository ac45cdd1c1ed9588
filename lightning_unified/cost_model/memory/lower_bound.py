"""Lower bound of a step's memory, from a trace with more rows or without recomputation.

The search uses it to exclude sizes and options before it traces them.
"""

from collections.abc import Mapping
from functools import lru_cache

from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.trace import Take, Trace, Work

__all__ = ["is_within", "least_bytes"]

_WHATEVER_ROWS = (
    "weights",
    "gathered weights",
    "gradients",
    "optimizer state",
    "buffers",
    "communication",
    "callbacks",
    "batch",
)
"""Categories whose bytes do not depend on the split; the whole batch waits on the device."""

_Living = Mapping[int, tuple[Take, str]]


def least_bytes(
    trace: Trace, rows: int, *, without: frozenset[str] = frozenset(), only: frozenset[str] | None = None
) -> int:
    """Return a lower bound of the peak of a step of micro-batches of `rows`, from one of more rows.

    Every storage that lives at the peak of the larger step lives at the same instant of the smaller one. The bytes of a
    storage are an affine function of the rows with an intercept of 0 or more, so the smaller step holds at least its share
    `rows / trace.rows`. Weights, gradients, optimizer state, buffers and the batch do not change.

    Args:
        trace: A step of no fewer rows, with the whole batch in it.
        rows: Rows of the smallest micro-batch in question.
        without: Names of modules whose storages need not be live.
        only: Names of modules that run as in `trace`, while others, such as the loss, do not. Of the others only activations
            count. None if all modules run as in `trace`.
    """
    fixed = grows = 0
    for take, place in _at_peak(trace).values():
        if take.category in _WHATEVER_ROWS:
            fixed += take.bytes
        elif is_within(place, without):
            continue
        elif only is None or take.category == "activations" or is_within(place, only):
            grows += take.bytes
    return fixed + int(grows * min(rows / trace.rows, 1.0))


@lru_cache(maxsize=2**14)  # a search asks again and again for the few places of a trace
def is_within(place: str, names: frozenset[str]) -> bool:
    """Return whether a module's name is one of `names`, or lies inside one of them."""
    return any(place == name or place.startswith(f"{name}.") for name in names)


def _at_peak(trace: Trace) -> _Living:
    """Return the storages that live at the peak, each with the module in which it began.

    They are found once for a trace.
    """
    if "at peak" not in trace.kept:
        trace.kept["at peak"] = _living_at_peak(trace)
    return trace.kept["at peak"]


def _living_at_peak(trace: Trace) -> _Living:
    living: dict[int, tuple[Take, str]] = {}
    place = ""
    for event in trace.events[: peak(trace, rounding=1).index + 1]:
        if isinstance(event, Work):
            place = event.place
        elif isinstance(event, Take):
            living[event.storage] = (event, place)
        else:
            living.pop(event.storage, None)
    return living
