"""Traces of steps whose gradients keep their memory from step to step."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeGuard

from lightning_unified.cost_model.trace.trace import Event, Give, Take, Work

__all__ = ["added_at_once", "with_gradient_buffer"]


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
    return (*found[:first], *(event for _, event in added_at_once(found[first:], buffer)))


def added_at_once(step: Iterable[Event], buffer: Collection[int]) -> Iterator[tuple[int, Event]]:
    """Yield the events of a step with its gradients as temporaries.

    The storages in `buffer` are not freed. Each event comes with its place in `step`. A gradient is freed before the operation that follows, or, where a forward pass makes it, before
    the first one of the backward pass. The free has the place of that operation.
    """
    step = list(step)
    own = {one.storage for one in step if _is_gradient(one)}
    due: list[Give] = []
    phase = ""
    for at, event in enumerate(step):
        if isinstance(event, Work):
            if "backward" in (phase, event.phase):
                yield from ((at, give) for give in due)
                due = []
            phase = event.phase
            yield at, event
        elif isinstance(event, Take) and event.storage in own:
            yield at, replace(event, category="temporaries")
            due.append(Give(storage=event.storage))
        elif not (isinstance(event, Give) and (event.storage in own or event.storage in buffer)):
            yield at, event
    yield from ((len(step) - 1, give) for give in due)


def _is_gradient(event: Event) -> TypeGuard[Take]:
    return isinstance(event, Take) and event.category == "gradients"
