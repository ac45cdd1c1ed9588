"""A traced step as a planner counts it: with what is there beside it, without what it does not do."""

from collections.abc import Callable
from dataclasses import replace

from lightning_unified.cost_model.trace.trace import Event, Take, Trace, Work

__all__ = ["told"]


def told(step: Callable[..., Trace], *size: int, updates: bool, reduction_bytes: int) -> Trace:
    """Return a step of that size as this planner counts it."""
    trace = _beside(step(*size), reduction_bytes)
    return trace if updates else _without_optimizer(trace)


def _beside(trace: Trace, count: int) -> Trace:
    """Return the step with so many bytes that are there all the while, for the reduction over ranks."""
    if not count:
        return trace
    taken = (event.storage for event in trace.events if isinstance(event, Take))
    scratch = Take(storage=max(taken, default=0) + 1, bytes=count, category="workspaces")
    return replace(trace, events=(Work(op="reduction over ranks", phase="setup"), scratch, *trace.events))


def _without_optimizer(trace: Trace) -> Trace:
    """Return the step as it is where weights are not written: without optimizer state and what its phase does."""
    events: list[Event] = []
    left_out: set[int] = set()
    phase = "setup"
    for event in trace.events:
        if isinstance(event, Work):
            phase = event.phase
        elif isinstance(event, Take) and (phase == "optimizer step" or event.category == "optimizer state"):
            left_out.add(event.storage)
        if phase == "optimizer step" and isinstance(event, Work):
            continue
        if not isinstance(event, Work) and event.storage in left_out:
            continue
        events.append(event)
    return replace(trace, events=tuple(events))
