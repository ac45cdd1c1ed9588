"""The timeline of a step: its events in order and each storage's lifetime, without sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_unified.cost_model.trace.trace import Event, Give, Passes, Take, Trace, Work

__all__ = ["MisalignedError", "Timeline", "align", "describe_slot", "timeline_of"]

_NEVER = 1 << 40  # the end of a storage that outlives the step

Integers = NDArray[np.int64]


class MisalignedError(ValueError):
    """Traces do not show one step at several sizes, so that no size can be interpolated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Events of a step as slots: one for each operation and one for each storage that begins.

    Attributes:
        slots: Operations and beginnings of storages, in order.
        births: Slot of each storage, in the order in which storages begin.
        ends: Slot before which each storage ends: the number of slots if it ends after the last, `_NEVER` if it outlives the
            step.
    """

    slots: tuple[Work | Take, ...]
    births: Integers
    ends: Integers

    def keys(self) -> list[tuple[str, ...]]:
        """Return for each slot the values that must be equal in another trace of the same step."""
        return [
            (slot.op, slot.phase, slot.place, slot.dtype) if isinstance(slot, Work) else (slot.category,)
            for slot in self.slots
        ]

    def values(self) -> NDArray[np.float64]:
        """Return two figures a slot: bytes and 0 of a storage, flops and bytes moved of a `Work`.

        All first figures come before all second ones.
        """
        first = [slot.bytes if isinstance(slot, Take) else slot.flops for slot in self.slots]
        second = [0 if isinstance(slot, Take) else slot.moved for slot in self.slots]
        return np.array(first + second, dtype=np.float64)

    def events(self, first: Sequence[int], second: Sequence[int]) -> tuple[Event, ...]:
        """Return the events of a trace with the figures of `values`."""
        order = np.argsort(self.ends, kind="stable")
        ends, given, taken = self.ends[order].tolist(), 0, 0
        order = order.tolist()
        events: list[Event] = []
        for at, slot in enumerate(self.slots):
            while given < len(ends) and ends[given] <= at:
                events.append(Give(order[given]))
                given += 1
            if isinstance(slot, Take):
                events.append(Take(taken, first[at], slot.category, stream=slot.stream))
                taken += 1
            elif slot.flops == first[at] and slot.moved == second[at]:
                events.append(slot)
            else:
                events.append(_resized(slot, flops=first[at], moved=second[at]))
        events += [Give(storage) for storage, end in zip(order[given:], ends[given:], strict=True) if end < _NEVER]
        return tuple(events)


def _resized(work: Work, *, flops: int, moved: int) -> Work:
    """Return the operation at another size; where it stands for many, their number grows with the bytes moved."""
    if not isinstance(work, Passes) or not work.moved:
        return Work(work.op, work.phase, work.place, flops, moved, work.dtype)
    more = moved / work.moved
    launches, kernels = (max(round(more * count), 1) for count in (work.launches, work.kernels))
    return replace(work, flops=flops, moved=moved, launches=launches, kernels=kernels)


def timeline_of(trace: Trace) -> Timeline:
    """Return the timeline of `trace`; storages are renumbered in the order in which they begin."""
    slots: list[Work | Take] = []
    births: list[int] = []
    ends: list[int] = []
    order: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Give):
            if event.storage in order:
                ends[order.pop(event.storage)] = len(slots)
            continue
        if isinstance(event, Take):
            order[event.storage] = len(births)
            event = Take(len(births), event.bytes, event.category, stream=event.stream)  # noqa: PLW2901
            births.append(len(slots))
            ends.append(_NEVER)
        slots.append(event)
    return Timeline(slots=tuple(slots), births=np.array(births, dtype=np.int64), ends=np.array(ends, dtype=np.int64))


def align(timelines: Sequence[Timeline], names: Sequence[str]) -> Integers:
    """Return the end of each storage over several timelines of one step.

    An end is the latest slot in any of them. Python's garbage collector frees reference cycles at any time, so ends may
    differ where nothing else does. The latest end is the safe one.

    Raises:
        MisalignedError: If the timelines do not hold the same operations and storages in the same order.
    """
    keys = timelines[0].keys()
    for timeline, name in zip(timelines[1:], names[1:], strict=True):
        others = timeline.keys()
        if others != keys:
            pairs = zip(keys, others, strict=False)
            at = next((at for at, (key, other) in enumerate(pairs) if key != other), min(len(keys), len(others)))
            raise MisalignedError(
                f"the step runs other operations at other sizes: at its event {at + 1}, {describe_slot(timelines[0], at)} with {names[0]}, "
                f"but {describe_slot(timeline, at)} with {name}. Other sizes cannot be interpolated from these traces; "
                "trace the step at the size requested."
            )
    return np.max([timeline.ends for timeline in timelines], axis=0)


def describe_slot(timeline: Timeline, at: int) -> str:
    """Return the event of a slot in words."""
    if at >= len(timeline.slots):
        return "the step has ended"
    slot = timeline.slots[at]
    if isinstance(slot, Take):
        work = next((other for other in reversed(timeline.slots[:at]) if isinstance(other, Work)), None)
        where = f" by {describe_work(work)}" if work else ""
        return f"{slot.category} are taken{where}"
    return describe_work(slot)


def describe_work(work: Work) -> str:
    """Return an operation in words: its name, phase and module."""
    return f"{work.op} runs in the {work.phase}" + (f" of {work.place}" if work.place else "")
