"""A step of any size, computed from few that were traced: every event of it is a simple function of the size."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_unified.cost_model.trace.basis import Fit, Size, fit_monomials, rounds
from lightning_unified.cost_model.trace.repeat import repeat_of
from lightning_unified.cost_model.trace.timeline import MisalignedError, Timeline, align, describe_slot, timeline_of
from lightning_unified.cost_model.trace.trace import Take, Trace

__all__ = ["Interpolation", "MisalignedError", "interpolate"]


def interpolate(traces: Sequence[Trace]) -> "Interpolation":
    """Lay lines through the events of one step that was traced at several sizes.

    Two traces, at 2 and 4 rows, give every other number of rows. A third, of another length, gives every length as well, unless
    some storage mixes what grows with a row and what does not; further traces settle that, and check the rest. Traces of cut
    batches (`parts` of 2 and more) are a family of their own, for a cut batch runs other code: two rows at 2 parts and one trace
    of 3 parts give every number of parts.

    Args:
        traces: Of the same module, backend and options. One row is no size to fit from: it broadcasts and runs other kernels.

    Returns:
        The step at any size that the traces determine.

    Raises:
        MisalignedError: If the traces are not of one step: they differ in backend, options or what happens, or some storage
            is of no size that a few monomials of rows, length and parts would give.
        ValueError: If there is no trace, one row among several sizes, or a cut batch of 3 parts without one of 2.
    """
    traces = list(traces)
    if not traces:
        raise ValueError("there are no traces to fit; give one at 2 rows and one at 4.")
    sizes = {_size(trace) for trace in traces}
    if len(sizes) > 1 and any(rows == 1 for rows, _, _ in sizes):
        raise ValueError(
            "one of the traces is of 1 row, where dimensions broadcast and other kernels run, so that it is on no line with the "
            "others; trace 2 and 4 rows, and 1 row by itself."
        )
    for other in traces[1:]:
        for what in ("backend", "options"):
            if getattr(other, what) != getattr(traces[0], what):
                raise MisalignedError(
                    f"the traces differ in {what}: {getattr(traces[0], what)} and {getattr(other, what)}; "
                    "fit those of one setting at a time."
                )
    return Interpolation(traces)


class Interpolation:
    """A step at any size. Made by `interpolate`.

    Attributes:
        sizes: Rows, length and parts that were traced; a length of 0 stands for rows without one.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.sizes: tuple[Size, ...] = tuple(dict.fromkeys(map(_size, traces)))
        self._reference = max(traces, key=_size)
        self._reads = tuple(dict.fromkeys(read for trace in traces for read in trace.reads))
        self._notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
        whole = [trace for trace in traces if trace.parts == 1]
        cut = [trace for trace in traces if trace.parts > 1]
        self._families = {name: _Family(members) for name, members in (("whole", whole), ("cut", cut)) if members}

    def at(self, rows: int, *, length: int | None = None, parts: int | None = None) -> Trace:
        """Return the step of micro-batches of `rows`.

        Args:
            rows: Of a micro-batch.
            length: Entries of a row; None is the longest that was traced.
            parts: Micro-batches in the step; None is 1, or 2 where only cut batches were traced.

        Returns:
            Its trace. At sizes that were traced it equals the trace that was given, but for the storages' numbers and the
            order of storages that end together.

        Raises:
            ValueError: If the traces do not determine that size.
        """
        size = self._asked(rows, length, parts)
        timeline, values, notes = self._family(size).at(size)
        first, second = values.astype(np.int64).tolist()
        if size not in self.sizes:
            notes = (*notes, f"computed from the step traced at {self._traced()}")
        return replace(
            self._reference,
            events=timeline.events(first, second),
            rows=size[0],
            length=size[1] or None,
            parts=size[2],
            reads=self._reads,
            notes=(*self._notes, *notes),
        )

    def peak_bytes(self, rows: int, *, length: int | None = None, parts: int | None = None, rounding: int = 512) -> int:
        """Return the bytes of `peak(self.at(...), rounding=rounding)` without making the trace.

        Args:
            rows: As in `at`.
            length: As in `at`.
            parts: As in `at`.
            rounding: As in `peak`.

        Raises:
            ValueError: As `at`.
        """
        size = self._asked(rows, length, parts)
        timeline, values, _ = self._family(size).at(size)
        count = len(timeline.slots)
        taken = np.ceil(values[0, timeline.births] / rounding) * rounding
        change = np.bincount(timeline.births, weights=taken, minlength=count + 1)
        change -= np.bincount(np.minimum(timeline.ends, count), weights=taken, minlength=count + 1)
        return int(np.cumsum(change)[:count].max(initial=0))

    def _asked(self, rows: int, length: int | None, parts: int | None) -> Size:
        if rows < 1:
            raise ValueError(f"rows={rows}; a micro-batch has at least 1.")
        if parts is None:
            parts = 1 if "whole" in self._families else 2
        longest = max(size[1] for size in self.sizes)
        size = (rows, longest if length is None else length, parts)
        self._family(size).refuse(size)
        return size

    def _family(self, size: Size) -> "_Family":
        name = "whole" if size[2] == 1 else "cut"
        family = self._families.get(name)
        if family is None:
            raise ValueError(
                f"parts={size[2]} was asked for, but only {'cut' if size[2] == 1 else 'whole'} batches were traced; give `interpolate` "
                f"traces of {'1 part' if size[2] == 1 else '2 and 3 parts'} as well."
            )
        return family

    def _traced(self) -> str:
        return ", ".join(describe_size(size) for size in sorted(self.sizes))


def describe_size(size: Size) -> str:
    """Return a size in words: `"4 rows of 128 in 2 parts"`."""
    rows, length, parts = size
    return f"{rows} rows" + (f" of {length}" if length else "") + (f" in {parts} parts" if parts > 1 else "")


def _size(trace: Trace) -> Size:
    return trace.rows, trace.length or 0, trace.parts


class _Family:
    """The traces of whole batches, or those of cut ones."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._least = 1 if traces[0].parts == 1 else 2
        short = [trace for trace in traces if trace.parts == self._least]
        long = [trace for trace in traces if trace.parts == 3]
        if not short or len(short) + len(long) < len(traces):
            raise ValueError(
                f"the cut batches have {sorted({trace.parts for trace in traces})} parts; trace them in 2 parts, and in 3 for "
                "what repeats with every further one."
            )
        self._sizes = [_size(trace) for trace in (*short, *long)]
        self._timeline, values = _aligned(short)
        self._repeat = None
        if long:
            timeline, more = _aligned(long)
            self._repeat = repeat_of(self._timeline, timeline)
            values += [self._repeat.without(figures) for figures in more]
        self._fit = self._fitted(np.stack(values))
        self.at = lru_cache(maxsize=8)(self._at)

    def refuse(self, size: Size) -> None:
        """Refuse a size that the traces do not determine."""
        for axis, name in ((0, "rows"), (1, "length")):
            known = {given[axis] for given in self._sizes}
            if len(known) == 1 and size[axis] not in known:
                raise ValueError(
                    f"{name}={size[axis]} was asked for, but the step was traced at {name}={known.pop() or None} only; give `interpolate` "
                    f"a trace at another {name} as well."
                )

    def _at(self, size: Size) -> tuple[Timeline, NDArray[np.float64], tuple[str, ...]]:
        """Return what happens at `size`, the figures of its slots, and what must be known of them."""
        parts = size[2]
        values = self._fit.at(size).reshape(2, -1)
        if self._repeat is not None:
            timeline, order = self._repeat.timeline(parts)
            return timeline, values[:, order], ()
        if parts == self._least:
            return self._timeline, values, ()
        batch = [
            at for at, slot in enumerate(self._timeline.slots) if isinstance(slot, Take) and slot.category == "batch"
        ]
        values[0, batch] *= parts / self._least
        note = f"of {parts} micro-batches two are in the trace, with the batch of all; no step of three was traced"
        return self._timeline, values, (note,)

    def _fitted(self, values: NDArray[np.float64]) -> Fit:
        fitted = fit_monomials(self._sizes, values)
        count = len(self._timeline.slots)
        bad = self._timeline.births[~rounds(fitted, values)[:count][self._timeline.births]]
        if bad.size:
            at = int(bad[0])
            sizes = "; ".join(
                f"{int(row[at])} bytes at {describe_size(size)}" for size, row in zip(self._sizes, values, strict=True)
            )
            raise MisalignedError(
                f"at event {at + 1} {describe_slot(self._timeline, at)}, {sizes}: no sum of four monomials of rows and length gives these. "
                "Trace the step at the size that is asked for."
            )
        return fitted


def _aligned(traces: Sequence[Trace]) -> tuple[Timeline, list[NDArray[np.float64]]]:
    """Return the one timeline of traces of several sizes, and the figures of each."""
    timelines = [timeline_of(trace) for trace in traces]
    ends = align(timelines, [describe_size(_size(trace)) for trace in traces])
    return replace(timelines[0], ends=ends), [timeline.values() for timeline in timelines]
