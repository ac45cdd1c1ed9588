"""Traces of steps whose gradients lie in one buffer from step to step, as those of recorded CUDA graphs do."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeGuard

from lightning_unified.cost_model.trace.trace import Event, Give, Take, Work

__all__ = ["with_gradient_buffer"]


def with_gradient_buffer(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events of a step in steady state whose gradients lie in a buffer that lives on.

    The gradients of the step before are the buffer: they are not freed. Gradients of the step are added to it and freed at once, or, where
    the forward pass makes them (a loss in chunks), at the first operation of the backward pass.
    """
    found = list(events)
    first = next(
        (at for at, event in enumerate(found) if isinstance(event, Work) and event.phase != "setup"), len(found)
    )
    buffer = {one.storage for one in found[:first] if _is_gradient(one)}
    if not buffer:  # no steady state: no gradient is there when the step begins
        return tuple(found)
    return (*found[:first], *_added_at_once(found[first:], buffer))


def _added_at_once(step: list[Event], buffer: set[int]) -> list[Event]:
    """Return the step with its gradients as temporaries, and without frees of the buffer."""
    own = {one.storage for one in step if _is_gradient(one)}
    events: list[Event] = []
    due: defaultdict[str, list[Event]] = defaultdict(list)  # frees, by the phase whose next operation they precede
    for event in step:
        if isinstance(event, Work):
            events += due.pop(event.phase, [])
            events.append(event)
        elif isinstance(event, Take) and event.storage in own:
            events.append(replace(event, category="temporaries"))
            due["backward"].append(Give(storage=event.storage))
        elif not (isinstance(event, Give) and event.storage in own | buffer):
            events.append(event)
    return [*events, *(give for gives in due.values() for give in gives)]


def _is_gradient(event: Event) -> TypeGuard[Take]:
    return isinstance(event, Take) and event.category == "gradients"
