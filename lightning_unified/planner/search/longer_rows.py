"""The step of a whole batch at longer rows than planned, from traces of two lengths.

The events of a step are functions of its rows and their length (`cost_model.trace.interpolation`). With the planned rows, a dry run at a
longer length than asked gives all lengths up to it. The first real batch of such a length then confirms the result: each storage of its own
dry run must take the same bytes. If one does not, the step's memory also depends on something else, such as the values of its masks.
"""

from typing import Any

from lightning_unified.cost_model.trace.interpolation import Interpolation, MisalignedError
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.row_lengths import UNPADDED, aligned
from lightning_unified.planner.search.step_traces import StepTraces
from lightning_unified.planner.search.traced_sizes import TracedSizes

__all__ = ["LongerRows"]

_APART = 128  # entries between two traced lengths, which have one remainder
_PADDED = 16  # entries; kernels that attention runs pad rows to multiples of it
_KEPT = 3  # traced lengths that determine the others: a square, a line and a constant


class LongerRows:
    """The step of a batch that runs at once, under one combination of memory options, at longer rows.

    Args:
        traces: The traces of the planned batch.
        combination: The memory options that are set.

    Attributes:
        rows: Rows of the batch.
        planned: Entries of a row of the planned batch; 0 where rows have no length.
    """

    def __init__(self, traces: StepTraces, combination: Combination) -> None:
        self._traces, self.rows = traces, traces.rows
        self._dry_run = traces.dry_run(combination, whole_chunks=True)
        planned = traces.of(combination).whole
        self.planned = planned.length or 0
        # a chunked loss may end with a shorter chunk, and kernels that pad other lengths may not pad this one
        is_usual = combination.loss_chunk is None and self.planned % UNPADDED > 0
        self._known = [planned] if is_usual else []
        self._remainder = self.planned % _APART if is_usual else _APART - 1
        self._lines: Interpolation | None = None
        self._is_confirmed = False

    def reaching(self, length: int, *, up_to: int) -> Trace:
        """Return the dry run of rows that are `length` long or longer, which lines go through.

        If there is none yet, it reaches `up_to` entries or more.

        Raises:
            MisalignedError: If the step is no function of its rows and their length.
            DryRunError: If a length cannot be traced.
        """
        if self._lines is None or length > (self._known[-1].length or 0):
            longest = aligned(max(length, up_to), self._remainder)
            if not self._known:  # both are longer: kernels choose their memory by the number of entries
                self._known, longest = [self._traced(longest)], longest + _APART
            self._known = [*self._known, self._traced(longest)][-_KEPT:]
            self._lines = Interpolation(self._known)
        return next(trace for trace in self._known if (trace.length or 0) >= length)

    def own(self, batch: Any, *, length: int) -> Trace:
        """Return the dry run of a batch, whose rows are `length` long.

        Raises:
            MisalignedError: If values that decide shapes were made up.
            DryRunError: If the step cannot be traced.
        """
        own = self._dry_run(self.rows, 1, self.rows, batch=batch, length=length)
        if own.confidence == "low":
            raise MisalignedError("values that decide shapes were made up on the way")
        return own

    def within_reach(self, batch: Any, *, length: int) -> Trace:
        """Return the step of a batch whose rows are no longer than those of `reaching`.

        It is the batch's own dry run until one has confirmed the lines, and where no kernel pads its rows.

        Raises:
            MisalignedError: If the step is no function of its rows and their length.
            DryRunError: If the step cannot be traced.
        """
        lines = self._lines
        assert lines is not None
        if length % UNPADDED == 0:
            return self.own(batch, length=length)
        if self._is_confirmed:
            return lines.at(self.rows, length=length)
        own = self.own(batch, length=length)
        lines.confirm(own, padding=_PADDED - 1)
        self._is_confirmed = True
        return own

    def completed(self, trace: Trace, *, row_bytes: int) -> Trace:
        """Add libraries' workspaces to a trace; a row of the batch has `row_bytes`."""
        workspaces = self._traces.counted.workspaces
        sizes = TracedSizes(
            lambda *_: trace, rows=self.rows, unit=self.rows, row_bytes=row_bytes, workspaces=workspaces
        )
        return sizes.exactly(self.rows, num_micro_batches=1)

    def _traced(self, length: int) -> Trace:
        return self._dry_run(self.rows, 1, self.rows, length=length)
