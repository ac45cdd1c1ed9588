"""Find the peak of live bytes in a trace: its size, categories and place in the step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_unified.cost_model.trace.trace import CATEGORIES, Category, Give, Phase, Take, Trace, Work

__all__ = ["Peak", "describe_instant", "instants", "peak"]

_START = Work(op="", phase="setup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The peak of live bytes.

    Attributes:
        bytes: Its size; the sum of `categories`.
        categories: Bytes by category, without empty ones.
        index: Index of the first event after which the peak lives.
        instant: The same in words, such as `"backward of layers.3.mlp (aten.mm)"`.
    """

    bytes: int
    categories: dict[Category, int]
    index: int
    instant: str


def peak(trace: Trace, *, rounding: int = 512) -> Peak:
    """Return the peak of live bytes in `trace`, which is computed once for a trace.

    Args:
        trace: A step.
        rounding: Multiple of bytes to which each storage is rounded up; 512 is CUDA's, 1 counts the bytes requested.
    """
    key = "peak", rounding
    if key not in trace.kept:
        trace.kept[key] = _found(trace, rounding)
    return trace.kept[key]


def _found(trace: Trace, rounding: int) -> Peak:
    most, index = 0, 0
    for at, count, _ in _running(trace, rounding=rounding):
        if count > most:
            most, index = count, at
    live: dict[int, Take] = {}
    for event in trace.events[: index + 1]:
        if isinstance(event, Take):
            live[event.storage] = event
        elif isinstance(event, Give):
            live.pop(event.storage, None)
    sums: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for take in live.values():
        sums[take.category] += _up(take.bytes, rounding)
    categories: dict[Category, int] = {category: count for category, count in sums.items() if count}
    return Peak(bytes=most, categories=categories, index=index, instant=describe_instant(trace, index))


def describe_instant(trace: Trace, index: int) -> str:
    """Return the place of the event at `index` in words: phase, module and operation."""
    work = next((event for event in reversed(trace.events[: index + 1]) if isinstance(event, Work)), _START)
    op = f" ({work.op.removesuffix('.default')})" if work.op else ""
    return _place(work.phase, work.place) + op


def instants(
    trace: Trace, *, rounding: int = 512, levels: Sequence[int] | None = None, most: int = 40
) -> tuple[tuple[str, int], ...]:
    """Return the peak of each place of the step, in the order of the step, for a table.

    Args:
        trace: A step.
        rounding: As in `peak`.
        levels: Bytes after each event, such as those of an allocator's blocks; None counts the tensors.
        most: Most rows of the table. Modules merge with their parents, the innermost first, until the table is short enough.

    Returns:
        Pairs of a phase and a module in words, and the peak of live bytes there.
    """
    peaks: dict[tuple[Phase, str], int] = {}
    for index, live, work in _running(trace, rounding=rounding):
        if work.phase == "sampling":  # has a peak of its own, by formula
            continue
        key = (work.phase, work.place)
        peaks[key] = max(peaks.get(key, 0), live if levels is None else levels[index])
    deepest = max((place.count(".") + 1 for _, place in peaks if place), default=0)
    joined = peaks
    for depth in range(deepest, -1, -1):
        joined = {}
        for (phase, place), count in peaks.items():
            key = (phase, ".".join(place.split(".")[:depth]))
            joined[key] = max(joined.get(key, 0), count)
        if len(joined) <= most:
            break
    return tuple((_place(phase, place), count) for (phase, place), count in joined.items())


def _running(trace: Trace, *, rounding: int) -> Iterator[tuple[int, int, Work]]:
    """Yield for each event its index, the bytes that live after it, and its operation."""
    sizes: dict[int, int] = {}
    live, work = 0, _START
    for index, event in enumerate(trace.events):
        if isinstance(event, Work):
            work = event
        elif isinstance(event, Take):
            sizes[event.storage] = _up(event.bytes, rounding)
            live += sizes[event.storage]
        else:
            live -= sizes.pop(event.storage, 0)
        yield index, live, work


def _place(phase: Phase, place: str) -> str:
    words = "before the step" if phase == "setup" else phase
    return f"{words} of {place}" if place else words


def _up(size: int, rounding: int) -> int:
    return -(-size // rounding) * rounding
