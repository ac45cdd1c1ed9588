"""Interpolate the trace of a step at any size from a few traced sizes.

Tracing takes seconds, and a search asks for dozens of sizes. But one step at two sizes runs the same operations in the same
order; only bytes and flops differ, and each of these is a simple function of the size. The method:

1. Check that the traces have the same timeline (`timeline.align`).
2. Fit each figure by a few monomials of rows and length (`basis.fit_monomials`).
3. At a requested size, evaluate the fit and rebuild the events.

A split batch runs other code than a whole one, so all traces have the same number of micro-batches. A trace that contradicts
the method raises `MisalignedError`; the caller then traces the requested size itself.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_unified.cost_model.trace.basis import Size, allowance, fit_monomials, rounds
from lightning_unified.cost_model.trace.timeline import MisalignedError, Timeline, align, describe_slot, timeline_of
from lightning_unified.cost_model.trace.trace import Take, Trace, Work

__all__ = ["Interpolation", "MisalignedError"]

_SETTINGS = {"backend": "backend", "options": "options", "num_micro_batches": "micro-batches"}  # in words


class Interpolation:
    """A step at any size that the given traces determine.

    Two traces, at 2 and 4 rows, determine every other number of rows. A third, of another length, determines every length as
    well, unless some storage mixes terms that grow with a row and terms that do not. Further traces settle that case and
    check the rest.

    Args:
        traces: Traces of one module, backend, setting of the memory options and number of micro-batches. A trace of one row
            cannot be combined with others: dimensions of size 1 broadcast, and other kernels run.

    Attributes:
        sizes: Rows and length of the given traces; a length of 0 stands for rows without one.

    Raises:
        MisalignedError: If the traces do not show one step: they differ in backend, options, micro-batches or events, or the
            bytes of some storage are no sum of a few monomials of rows and length.
        ValueError: If there is no trace, or one row among several sizes.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        _check(traces)
        self.sizes: tuple[Size, ...] = tuple(dict.fromkeys(map(_size, traces)))
        self._reference = max(traces, key=_size)
        self._reads = tuple(dict.fromkeys(read for trace in traces for read in trace.reads))
        self._notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
        timelines = [timeline_of(trace) for trace in traces]
        sizes = [_size(trace) for trace in traces]
        ends = align(timelines, list(map(describe_size, sizes)))
        self._timeline = replace(timelines[0], ends=ends)
        values = np.stack([timeline.values() for timeline in timelines])
        self._fit = fit_monomials(sizes, values)
        _check_births(self._timeline, rounds(self._fit, values), values, sizes)

    @property
    def has_spare_size(self) -> bool:
        """Whether the bytes of each storage are a sum of fewer monomials than there are traced sizes."""
        terms = np.count_nonzero(self._fit.coefficients[:, self._timeline.births], axis=0)
        return bool((terms < len(self.sizes)).all())

    def at(self, rows: int, *, length: int | None = None, later_rows: int | None = None) -> Trace:
        """Return the trace of a step of micro-batches of `rows`.

        At a traced size it equals the given trace, except for the numbers of storages and the order of storages that end
        together.

        Args:
            rows: Rows of a micro-batch.
            length: Entries of a row; None is the longest that was traced.
            later_rows: Rows of every micro-batch but the first; None for `rows`.

        Raises:
            ValueError: If the traces do not determine that size.
        """
        size = (rows, max(longest for _, longest in self.sizes) if length is None else length)
        self._refuse(size)
        figures = self._fit.at(size).reshape(2, -1)
        if later_rows not in (None, rows):
            figures = self._uneven(figures, self._fit.at((later_rows, size[1])).reshape(2, -1))
        first, second = figures.astype(np.int64).tolist()
        traced = ", ".join(describe_size(known) for known in sorted(self.sizes))
        num_micro_batches = self._reference.num_micro_batches
        split = f" in {num_micro_batches} micro-batches" if num_micro_batches > 1 else ""
        note = () if size in self.sizes else (f"interpolated from the step traced at {traced}{split}",)
        return replace(
            self._reference,
            events=self._timeline.events(first, second),
            rows=rows,
            length=size[1] or None,
            reads=self._reads,
            notes=(*self._notes, *note),
        )

    def confirm(self, trace: Trace, *, padding: int = 0) -> None:
        """Compare the interpolated step with a trace that it was not made from.

        Args:
            trace: The trace.
            padding: Entries by which a kernel may pad its rows less or more than those of the given traces.

        Raises:
            MisalignedError: If the trace holds other events, or the bytes of a storage differ by more than a kernel's rounding.
        """
        size, timeline = _size(trace), timeline_of(trace)
        self._refuse(size)
        align([self._timeline, timeline], ["interpolated sizes", describe_size(size)])
        found, least, most = (
            self._fit.at((size[0], size[1] + by))[: len(timeline.slots)] for by in (0, -padding, padding)
        )
        true, births = timeline.values()[: len(timeline.slots)], timeline.births
        bad = births[(np.maximum(least - true, true - most) > allowance(true))[births]]
        if bad.size:
            at = int(bad[0])
            raise MisalignedError(
                f"at event {at + 1} of {describe_size(size)}, {describe_slot(timeline, at)}: {int(true[at])} bytes, and interpolation "
                f"gives {int(found[at])}. Trace the step at the size requested."
            )

    def _uneven(self, first: NDArray[np.float64], later: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the figures of a step whose second micro-batch has other rows than its first.

        Both are on the device from the beginning, so their batch takes the mean of both figures.
        """
        slots = self._timeline.slots
        phases = [slot.phase if isinstance(slot, Work) else "" for slot in slots]
        turned = phases.index("backward") if "backward" in phases else len(slots)
        second = next((at for at in range(turned, len(slots)) if phases[at] == "forward"), len(slots))
        figures = np.where(np.arange(len(slots)) < second, first, later)
        waiting = [at for at, slot in enumerate(slots) if isinstance(slot, Take) and slot.category == "batch"]
        figures[:, waiting] = (first[:, waiting] + later[:, waiting]) / 2
        return figures

    def _refuse(self, size: Size) -> None:
        """Raise `ValueError` for a size that the traces do not determine."""
        if size[0] < 1:
            raise ValueError(f"rows={size[0]}; a micro-batch has at least 1.")
        for axis, name in ((0, "rows"), (1, "length")):
            known = {given[axis] for given in self.sizes}
            if len(known) == 1 and size[axis] not in known:
                raise ValueError(
                    f"{name}={size[axis]} was requested, but the step was traced at {name}={known.pop() or None} only; give "
                    f"`Interpolation` a trace at another {name} as well."
                )


def describe_size(size: Size) -> str:
    """Return a size in words: `"4 rows of 128"`."""
    rows, length = size
    return f"{rows} rows" + (f" of {length}" if length else "")


def _size(trace: Trace) -> Size:
    return trace.rows, trace.length or 0


def _check(traces: Sequence[Trace]) -> None:
    """Raise unless the traces can show one step at several sizes."""
    if not traces:
        raise ValueError("there are no traces to fit; give one at 2 rows and one at 4.")
    sizes = {_size(trace) for trace in traces}
    if len(sizes) > 1 and any(rows == 1 for rows, _ in sizes):
        raise ValueError(
            "one of the traces has 1 row, where dimensions broadcast and other kernels run, so it cannot be combined with the "
            "others; trace 2 and 4 rows, and 1 row by itself."
        )
    for other in traces[1:]:
        for name, what in _SETTINGS.items():
            if getattr(other, name) != getattr(traces[0], name):
                raise MisalignedError(
                    f"the traces differ in {what}: {getattr(traces[0], name)} and {getattr(other, name)}; "
                    "interpolate traces of one setting at a time."
                )


def _check_births(
    timeline: Timeline, fitted: NDArray[np.bool_], values: NDArray[np.float64], sizes: Sequence[Size]
) -> None:
    """Raise for the first storage whose bytes the fit does not give."""
    bad = timeline.births[~fitted[: len(timeline.slots)][timeline.births]]
    if bad.size:
        at = int(bad[0])
        found = "; ".join(
            f"{int(row[at])} bytes at {describe_size(size)}" for size, row in zip(sizes, values, strict=True)
        )
        raise MisalignedError(
            f"at event {at + 1} {describe_slot(timeline, at)}, {found}: no sum of four monomials of rows and length gives these. "
            "Trace the step at the size requested."
        )
