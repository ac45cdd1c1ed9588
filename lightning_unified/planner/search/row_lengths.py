"""A split step at any row length, from dry runs at three lengths.

The events of a step are functions of its rows and their length (`cost_model.trace.interpolation`). Dry runs at three lengths determine all
others. The first real batch of another length then confirms the result: each storage of its own dry run must take the same bytes. If one
does not, the step's memory also depends on something else, such as the values of its masks, and every length needs its own dry runs.

Kernels pad rows to multiples of 16 to 128 entries. So dry runs have lengths with one remainder modulo 128 (`aligned`), and others count as
the next longer one. The remainder is that of the planned batch where its dry runs can serve as the first of the three lengths.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from lightning_unified.cost_model.trace.interpolation import Interpolation, MisalignedError
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.step_traces import StepTraces
from lightning_unified.planner.search.traced_sizes import TracedSizes

__all__ = ["UNPADDED", "RowLengths", "aligned"]

_ROWS = (2, 3)  # units of a micro-batch in dry runs; one unit broadcasts and runs other kernels
_ALIGNED = (
    128  # entries; kernels pad rows to divisors of it, and attention's backward pass works in blocks of 64 or 128
)
_FIRST = 3  # multiples of it: rows up to here are traced at 1, 2 and 3
UNPADDED = 8
"""Entries of a row; no kernel pads rows of some multiples of it."""


class RowLengths:
    """The step of a batch in several micro-batches, under one combination of memory options, at any row length.

    Every trace holds two micro-batches, even where the whole batch runs at once. It then counts one gradient buffer too many, so the
    figures are an upper bound.

    Args:
        traces: The traces of a planned batch.
        combination: The memory options that are set.
    """

    def __init__(self, traces: StepTraces, combination: Combination) -> None:
        self._traces, self._combination = traces, combination
        self._dry_run = traces.dry_run(combination, whole_chunks=True)
        self._lines: Interpolation | None = None
        self._remainder = _ALIGNED - 1

    @property
    def is_known(self) -> bool:
        """Whether further lengths need no dry run."""
        return self._lines is not None

    @property
    def unit(self) -> int:
        """Rows that stay together."""
        return self._traces.unit

    def learn(self, batch: Any, *, length: int) -> None:
        """Trace three lengths, and confirm the result by a dry run of `batch`, whose rows are `length` long.

        The first length is traced with other rows too if the three traces do not determine all storages with one trace to spare.

        Raises:
            MisalignedError: If the step is no function of its rows and their length.
            DryRunError: If a size cannot be traced.
        """
        own = self._traces.of(self._combination).even_traces(num_micro_batches=2)
        if not own or own[-1].length is None:
            raise MisalignedError("no micro-batches of one size were traced, or their rows have no length")
        known = {} if self._combination.loss_chunk else {(trace.rows, trace.length): trace for trace in own}
        small, *_, large = sorted(rows for rows, _ in known) if len(known) > 1 else (0, 0)
        longest = max(own[-1].length, length)
        if small < large and _can_be_first(own[-1].length, length):
            self._remainder = own[-1].length % _ALIGNED
        else:
            small = self._least_rows(longest)
            large = small + (_ROWS[1] - _ROWS[0]) * self.unit
        first, *others = _lengths(longest, self._remainder)
        sizes = [(small, first), *((self._as_many(large, first, length=one), one) for one in others), (large, first)]
        rows = self._as_many(large, first, length=length)

        @cache
        def traced(rows: int, length: int) -> Trace:
            return self._dry_run(rows, 2, rows, length=length)

        @cache
        def own_trace() -> Trace:
            trace = self._dry_run(rows, 2, rows, batch=batch, length=self.aligned(length))
            if trace.confidence == "low":
                raise MisalignedError("values that decide shapes were made up on the way")
            return trace

        if sizes[-1] not in known:
            with suppress(MisalignedError):
                lines = _lines_through(sizes[:-1], known, traced)
                if lines.has_spare_size:
                    lines.confirm(own_trace())
                    self._lines = lines
                    return
        lines = _lines_through(sizes, known, traced)
        lines.confirm(own_trace())
        self._lines = lines

    def aligned(self, length: int) -> int:
        """Return the next length with the remainder of the traced lengths."""
        return aligned(length, self._remainder)

    def sizes(self, length: int, *, rows: int, row_bytes: int) -> TracedSizes:
        """Return the step of a batch whose rows are `length` long, at the sizes that a search needs.

        Args:
            length: Entries of a row, as `aligned` gives it.
            rows: Rows of the whole batch.
            row_bytes: Bytes of one row of the batch.
        """
        lines, least = self._lines, _ROWS[0] * self.unit
        assert lines is not None

        def trace_step(first: int, num_micro_batches: int, later: int) -> Trace:
            if min(first, later) < least:
                return self._dry_run(first, num_micro_batches, later, length=length)
            return lines.at(first, length=length, later_rows=later)

        counted = self._traces.counted
        found = TracedSizes(trace_step, rows=rows, unit=self.unit, row_bytes=row_bytes, workspaces=counted.workspaces)
        found.distrust_lines()
        return found

    def _least_rows(self, length: int) -> int:
        """Return the fewest rows of a trace.

        They have more tokens than a chunk of the loss, because a second chunk runs other operations than the first.
        """
        chunk = self._combination.loss_chunk or 0
        rows = chunk // max(length - 1, 1) + 1  # a row's last token has no label
        return max(-(-rows // self.unit), _ROWS[0]) * self.unit

    def _as_many(self, rows: int, of: int, *, length: int) -> int:
        """Return the rows of `length` that have at least as many entries as `rows` of the length `of`.

        Kernels choose their memory by the number of entries: the gradient of an embedding table is sorted above 3,072 tokens on CUDA.
        """
        return max(-(-rows * of // (length * self.unit)), _ROWS[0]) * self.unit


def _lines_through(
    sizes: Sequence[tuple[int, int]],
    known: Mapping[tuple[int, int | None], Trace],
    traced: Callable[[int, int], Trace],
) -> Interpolation:
    """Return the lines through rows and lengths.

    Traces of the plan serve where they can. Those of a module's own chunked loss may end with a shorter chunk, and fit no line.
    """
    try:
        return Interpolation([known[size] if size in known else traced(*size) for size in sizes])
    except MisalignedError:
        if not any(size in known for size in sizes):
            raise
        return Interpolation([traced(*size) for size in sizes])


def aligned(length: int, remainder: int = _ALIGNED - 1) -> int:
    """Return the next length with this remainder modulo 128, by default one less than a multiple.

    Kernels pad rows of masks and sums to multiples of 16 to 128, so at these lengths they add the same number of entries. The bytes are then
    polynomials of the length. At a multiple of 16 a kernel would pad nothing and take fewer tensors, which most lengths do take.
    """
    return length + (remainder - length) % _ALIGNED


def _can_be_first(planned: int, length: int) -> bool:
    """Return whether the traces of the plan serve as those of the longest length.

    The planned length must be the longest and padded by all kernels, and leave two shorter lengths to trace.
    """
    return planned >= length and planned % UNPADDED > 0 and planned // _ALIGNED + 1 >= _FIRST


def _lengths(longest: int, remainder: int) -> list[int]:
    """Return three lengths, the longest first: three tell a square from the sum of a square and a line."""
    most = max(aligned(longest, remainder) // _ALIGNED + 1, _FIRST)
    return [_ALIGNED * (count - 1) + remainder for count in (most, 4 * most // 5, 3 * most // 5)]
