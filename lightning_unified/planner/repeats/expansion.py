"""Expand a recording in which blocks were skipped: copy the events of their traced twin.

A recording has marks where each block begins (`Mark`). Between two marks of a skipped block lie only frees of tensors that stand for its
results. Its events are those of the run's second block, with three changes: the names of modules, the numbers of storages, and the block
whose storages are freed. A block may free its own storages and the results of the blocks beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_unified.cost_model.trace.trace import Give, Work
from lightning_unified.planner.fake.storages import Storage
from lightning_unified.planner.repeats.marks import Mark, Span

__all__ = ["Raw", "Segment", "UnlikeError", "expanded", "segments_of"]

Raw = Work | Storage | Give | Mark
_RESULT = "result"


class UnlikeError(Exception):
    """Blocks that count as equal differ, so all of them have to be traced."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The events between a block's mark and the next one.

    Attributes:
        mark: The mark.
        events: The operations, allocations and frees.
    """

    mark: Mark
    events: tuple[Any, ...]

    def works(self, block: str) -> list[tuple[str, str]]:
        """Return the operations, with places relative to the module named `block`."""
        return [(one.op, one.place.removeprefix(block)) for one in self.events if isinstance(one, Work)]


def segments_of(raw: Sequence[Raw]) -> dict[Span, Segment]:
    """Return the segments of a recording, by their spans.

    Raises:
        UnlikeError: If a block was called twice in one micro-batch.
    """
    starts = [at for at, event in enumerate(raw) if isinstance(event, Mark)]
    found: dict[Span, Segment] = {}
    for start, end in zip(starts, [*starts[1:], len(raw)], strict=True):
        mark = raw[start]
        assert isinstance(mark, Mark)
        if mark.span is None:
            continue
        if mark.span in found:
            raise UnlikeError("a block ran twice")
        found[mark.span] = Segment(mark, tuple(raw[start + 1 : end]))
    return found


class Births:
    """The origin of each storage of a recording: its span, and its index in that span."""

    def __init__(self, segments: Mapping[Span, Segment]) -> None:
        self.of: dict[int, tuple[Span, Any]] = {}
        for span, segment in segments.items():
            mark = segment.mark
            names: dict[int, Any] = {one.number: ("gradient", name) for name, one in mark.gradients.items()}
            if mark.result is not None:
                names[mark.result.number] = _RESULT
            taken = [one.number for one in segment.events if isinstance(one, Storage)]
            taken += [number for number in names if mark.skipped]
            self.of |= {number: (span, names.get(number, at)) for at, number in enumerate(taken)}


def normal(segment: Segment, births: Births, names: Sequence[str]) -> list[Any]:
    """Return a block's events without its name and numbers, so that those of twins are equal.

    Raises:
        UnlikeError: If the block frees a storage that is neither its own nor the result of a block beside it.
    """
    span = segment.mark.span
    assert span is not None
    found: list[Any] = []
    for event in segment.events:
        if isinstance(event, Work):
            kind = event.op, event.phase, event.flops, event.moved, event.dtype
            found.append((kind, _relative(event.place, span[2], names)))
        elif isinstance(event, Storage):
            found.append((event.bytes, event.category or "temporaries", births.of[event.number][1]))
        elif isinstance(event, Give):
            found.append(_freed(event, span, births))
    return found


def _freed(event: Give, span: Span, births: Births) -> tuple[Any, ...]:
    """Return which storage a block frees, relative to the block."""
    if event.storage not in births.of:
        raise UnlikeError("a block frees a storage that no block made")
    (direction, part, block), place = births.of[event.storage]
    if part != span[1] or abs(block - span[2]) > 1 or (block != span[2] and place != _RESULT):
        raise UnlikeError("a block frees a storage of another block")
    return direction, block - span[2], place


def _relative(place: str, block: int, names: Sequence[str]) -> tuple[int | None, str]:
    """Return a place relative to a block or to one beside it; None for places outside of these."""
    for beside in (0, -1, 1):
        at = block + beside
        if 0 <= at < len(names) and (place == names[at] or place.startswith(f"{names[at]}.")):
            return beside, place[len(names[at]) :]
    return None, place


def expanded(
    raw: Sequence[Raw],
    *,
    names: Sequence[str],
    twins: Mapping[int, tuple[int, int]],
    reserve: Callable[[int], Storage],
    works: dict[Any, Work] | None = None,
) -> list[Work | Storage | Give]:
    """Return the recording with the events of all skipped blocks, and without marks.

    Args:
        raw: The recording.
        names: The names of all blocks.
        twins: For each skipped block, the block whose events are copied, and another one that must have equal events.
        reserve: Makes a storage of a number of bytes.
        works: Operations of earlier recordings, which this one uses again and adds to; None for a recording of its own.

    Raises:
        UnlikeError: If the two traced blocks differ, or the copies do not fit into the recording.
    """
    segments = segments_of(raw)
    births = Births(segments)
    copies = _Copies(segments, births, names=names, twins=twins, reserve=reserve, works={} if works is None else works)
    copies.make()
    found: list[Work | Storage | Give] = []
    inside: Span | None = None
    for event in raw:
        if isinstance(event, Mark):
            inside = event.span
            if event.skipped and inside is not None:
                found += copies.events[inside]
        elif isinstance(event, Give):
            if event.storage not in copies.freed:
                found.append(event)
            found += map(Give, copies.freed_with(event.storage, inside))
        else:
            found.append(event)
    _check(found)
    return found


class _Copies:
    """The events of all skipped blocks."""

    def __init__(
        self,
        segments: Mapping[Span, Segment],
        births: Births,
        *,
        names: Sequence[str],
        twins: Mapping[int, tuple[int, int]],
        reserve: Callable[[int], Storage],
        works: dict[Any, Work],
    ) -> None:
        self._works = works
        self._segments, self._births, self._names = segments, births, names
        self._twins, self._reserve = twins, reserve
        self._normal: dict[Span, list[Any]] = {}
        self._storages: dict[tuple[Span, Any], Storage] = {}
        self._copied: dict[int, list[int]] = {}
        self.freed: set[int] = set()
        self.events: dict[Span, list[Work | Storage | Give]] = {}
        for span, segment in segments.items():
            if segment.mark.result is not None:
                self._storages[span, _RESULT] = segment.mark.result

    def make(self) -> None:
        """Make the copies: all storages first, for a block may free those of another."""
        skipped = [span for span, segment in self._segments.items() if segment.mark.skipped]
        for span in skipped:
            self._check_twins(span)
            self._take(span)
        for span in skipped:
            self.events[span] = self._events(span)

    def freed_with(self, number: int, inside: Span | None) -> list[int]:
        """Return the copies of a storage that is freed outside of all blocks."""
        copies = self._copied.get(number, [])
        if not copies or inside is None:
            return copies
        if inside[2] == self._births.of[number][0][2]:
            return []  # the copies of these events free them
        raise UnlikeError("a block frees a storage of another block")

    def _source(self, span: Span) -> Span:
        direction, part, block = span
        return direction, part, self._twins[block][0]

    def _check_twins(self, span: Span) -> None:
        direction, part, block = span
        one_twin, other_twin = self._twins[block]
        first: Span = (direction, part, one_twin)
        second: Span = (direction, part, other_twin)
        for one in (first, second):
            if one not in self._segments or self._segments[one].mark.skipped:
                raise UnlikeError("a block has no twin that was traced")
        self._keep_category(self._segments[first].mark.result, self._segments[second].mark.result)
        for one in (first, second):
            if one not in self._normal:
                self._normal[one] = normal(self._segments[one], self._births, self._names)
        if self._normal[first] != self._normal[second]:
            raise UnlikeError("two blocks differ")
        mark, other = self._segments[span].mark, self._segments[first].mark
        if (mark.result is None) != (other.result is None) or set(mark.gradients) != set(other.gradients):
            raise UnlikeError("a block was skipped with other results than its twin has")

    @staticmethod
    def _keep_category(first: Storage | None, second: Storage | None) -> None:
        """Give a result its twin's category: the skipped next block saved nothing for backward."""
        if first is not None and second is not None:
            second.category = second.category or first.category

    def _take(self, span: Span) -> None:
        """Make the storages of a skipped block; those of its results exist."""
        mark = self._segments[span].mark
        for event in self._segments[self._source(span)].events:
            if not isinstance(event, Storage):
                continue
            place = self._births.of[event.number][1]
            if place == _RESULT:
                made = mark.result
                assert made is not None
            elif isinstance(place, tuple):
                made = mark.gradients[place[1]]
            else:
                made = self._reserve(event.bytes)
                self._copied.setdefault(event.number, []).append(made.number)
            if made.bytes != event.bytes:
                raise UnlikeError("a block's result has another size than that of its twin")
            made.category = made.category or event.category
            self._storages[span, place] = made

    def _events(self, span: Span) -> list[Work | Storage | Give]:
        _, part, block = span
        source = self._source(span)
        found: list[Work | Storage | Give] = []
        for event, normalised in zip(self._segments[source].events, self._normal[source], strict=True):
            if isinstance(event, Work):
                beside, rest = normalised[1]
                place = rest if beside is None else self._names[block + beside] + rest
                key = event.op, event.phase, place, event.flops, event.moved, event.dtype
                work = self._works.get(key)
                if work is None:
                    work = self._works[key] = Work(*key)
                found.append(work)
            elif isinstance(event, Storage):
                found.append(self._storages[span, self._births.of[event.number][1]])
            else:
                of, beside, where = normalised
                storage = self._storages.get(((of, part, block + beside), where))
                if storage is None:
                    raise UnlikeError("a block frees a result that is none")
                self.freed.add(storage.number)
                found.append(Give(storage.number))
        return found


def _check(events: Sequence[Work | Storage | Give]) -> None:
    """Raise unless each storage begins once, and ends at most once after that."""
    begun: set[int] = set()
    living: set[int] = set()
    for event in events:
        if isinstance(event, Storage):
            if event.number in begun:
                raise UnlikeError("a storage begins twice")
            begun.add(event.number)
            living.add(event.number)
        elif isinstance(event, Give):
            if event.storage not in living:
                raise UnlikeError("a storage ends that does not live")
            living.remove(event.storage)
