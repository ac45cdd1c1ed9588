"""Interpolate the trace of a step at any size from a few traced sizes.

Tracing takes seconds, and a search asks for dozens of sizes. But one step at two sizes runs the same operations in the same
order; only bytes and flops differ, and each of these is a simple function of the size. The method:

1. Check that the traces have the same timeline (`timeline.align`).
2. Fit each figure by a few monomials of rows, length and micro-batches (`basis.fit_monomials`).
3. Find the slots that each further micro-batch inserts, from steps of two and three (`repeat.repeat_of`).
4. At a requested size, evaluate the fit, insert the repeats and rebuild the events.

Whole batches and split batches are two families, because a split batch runs other code. A trace that contradicts the method
raises `MisalignedError`; the caller then traces the requested size itself.
"""

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
    """Return the step at any size that the given traces determine.

    Two traces, at 2 and 4 rows, determine every other number of rows. A third, of another length, determines every length as
    well, unless some storage mixes terms that grow with a row and terms that do not. Further traces settle that case and
    check the rest. Traces of split batches (`parts` of 2 and more) form a family of their own, because a split batch runs
    other code. In that family two numbers of rows at 2 parts and one trace of 3 parts determine every number of parts.

    Args:
        traces: Traces of one module, backend and setting of the memory options. A trace of one row cannot be combined with
            others: dimensions of size 1 broadcast, and other kernels run.

    Raises:
        MisalignedError: If the traces do not show one step: they differ in backend, options or events, or the bytes of some
            storage are no sum of a few monomials of rows, length and parts.
        ValueError: If there is no trace, one row among several sizes, or a split batch of 3 parts without one of 2.
    """
    traces = list(traces)
    if not traces:
        raise ValueError("there are no traces to fit; give one at 2 rows and one at 4.")
    sizes = {_size(trace) for trace in traces}
    if len(sizes) > 1 and any(rows == 1 for rows, _, _ in sizes):
        raise ValueError(
            "one of the traces has 1 row, where dimensions broadcast and other kernels run, so it cannot be combined with the "
            "others; trace 2 and 4 rows, and 1 row by itself."
        )
    for other in traces[1:]:
        for what in ("backend", "options"):
            if getattr(other, what) != getattr(traces[0], what):
                raise MisalignedError(
                    f"the traces differ in {what}: {getattr(traces[0], what)} and {getattr(other, what)}; "
                    "interpolate traces of one setting at a time."
                )
    return Interpolation(traces)


class Interpolation:
    """A step at any size, made by `interpolate`.

    Attributes:
        sizes: Rows, length and parts of the given traces; a length of 0 stands for rows without one.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.sizes: tuple[Size, ...] = tuple(dict.fromkeys(map(_size, traces)))
        self._reference = max(traces, key=_size)
        self._reads = tuple(dict.fromkeys(read for trace in traces for read in trace.reads))
        self._notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
        whole = [trace for trace in traces if trace.parts == 1]
        split = [trace for trace in traces if trace.parts > 1]
        self._families = {name: _Family(members) for name, members in (("whole", whole), ("split", split)) if members}

    def at(self, rows: int, *, length: int | None = None, parts: int | None = None) -> Trace:
        """Return the trace of a step of micro-batches of `rows`.

        Args:
            rows: Rows of a micro-batch.
            length: Entries of a row; None is the longest that was traced.
            parts: Number of micro-batches in the step; None is 1, or 2 if only split batches were traced.

        Returns:
            The trace. At a traced size it equals the given trace, except for the numbers of storages and the order of
            storages that end together.

        Raises:
            ValueError: If the traces do not determine that size.
        """
        size = self._asked(rows, length, parts)
        timeline, values, notes = self._family(size).at(size)
        first, second = values.astype(np.int64).tolist()
        if size not in self.sizes:
            notes = (*notes, f"interpolated from the step traced at {self._traced()}")
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
        """Return the bytes of `peak(self.at(...), rounding=rounding)` without building the trace.

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
        name = "whole" if size[2] == 1 else "split"
        family = self._families.get(name)
        if family is None:
            raise ValueError(
                f"parts={size[2]} was requested, but only {'split' if size[2] == 1 else 'whole'} batches were traced; give `interpolate` "
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
    """The traces of whole batches, or those of split ones."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._least = 1 if traces[0].parts == 1 else 2
        short = [trace for trace in traces if trace.parts == self._least]
        long = [trace for trace in traces if trace.parts == 3]
        if not short or len(short) + len(long) < len(traces):
            raise ValueError(
                f"the split batches have {sorted({trace.parts for trace in traces})} parts; trace them in 2 parts, and in 3 to find "
                "the operations that repeat with each further one."
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
        """Raise `ValueError` for a size that the traces do not determine."""
        for axis, name in ((0, "rows"), (1, "length")):
            known = {given[axis] for given in self._sizes}
            if len(known) == 1 and size[axis] not in known:
                raise ValueError(
                    f"{name}={size[axis]} was requested, but the step was traced at {name}={known.pop() or None} only; give `interpolate` "
                    f"a trace at another {name} as well."
                )

    def _at(self, size: Size) -> tuple[Timeline, NDArray[np.float64], tuple[str, ...]]:
        """Return the timeline at `size`, the figures of its slots, and notes about them."""
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
        note = f"the trace holds two of {parts} micro-batches and the whole batch; no step of three was traced"
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
                "Trace the step at the size requested."
            )
        return fitted


def _aligned(traces: Sequence[Trace]) -> tuple[Timeline, list[NDArray[np.float64]]]:
    """Return the common timeline of traces of several sizes, and the figures of each."""
    timelines = [timeline_of(trace) for trace in traces]
    ends = align(timelines, [describe_size(_size(trace)) for trace in traces])
    return replace(timelines[0], ends=ends), [timeline.values() for timeline in timelines]
