"""One setting of the memory options at any size: traced at few, and when somebody asks."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lightning_unified.cost_model.backends import with_workspaces
from lightning_unified.cost_model.even_splits import cuts
from lightning_unified.cost_model.memory.lower_bound import least_bytes
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.interpolation import Lines, MisalignedError, fit
from lightning_unified.cost_model.trace.trace import Take, Trace, Work

__all__ = ["TracedSizes"]

_FEW = 8  # units of a batch up to which every size is traced by itself, and of a micro-batch up to which one fewer in the next tells
_TRIED = 3  # sizes of a cut batch that are traced as they are to run, before lines are laid for the others
_FIT = (2, 4)  # units of a micro-batch that lines are laid through; one is no point of a line, for it broadcasts


class TracedSizes:
    """A step under one setting of the memory options, as `planning.search` asks for it.

    The whole batch is traced as it is, and so are the first smaller sizes that are asked for: what is known of larger ones says what
    they take at least, and mostly the first one that can fit does. If several did not, further sizes lie on lines through two dry runs;
    where the step does something else at another size, so that there are no such lines, each is traced by itself as well.

    A batch of 10 rows in three parts runs as 4, 3 and 3, and blocks of four rows' activations then lie in the way of three's: what is
    allocated is less than for 4, 4 and 4, what is reserved can be far more. So such sizes are traced by themselves where they are
    small, and `exactly` tells the second part as it is.

    Args:
        trace: Traces a step by rows of its first micro-batch, number of micro-batches, and rows of the others.
        rows: Of the whole batch.
        unit: Rows that stay together.
        row_bytes: What a row of the batch takes.
        workspaces: Whether what libraries take for themselves is counted.
        least: What a step of so many rows takes at least, as is known of another setting.
        holds_batch: Whether a trace of several parts holds the whole batch, as one of a module with encoders does.
    """

    def __init__(
        self,
        trace_step: Callable[[int, int, int], Trace],
        *,
        rows: int,
        unit: int,
        row_bytes: int,
        workspaces: bool = True,
        least: Callable[[int], int] | None = None,
        holds_batch: bool = False,
    ) -> None:
        self._trace, self._least, self._holds_batch = trace_step, least, holds_batch
        self._rows, self._unit, self._row_bytes, self._workspaces = rows, unit, row_bytes, workspaces
        self._second = {cut[0]: cut[1] for cut in cuts(rows, unit=unit) if len(cut) > 1}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._own: dict[tuple[int, int, int], Trace] = {}
        self._peaks: dict[tuple[int, int], int] = {}
        self._lines: dict[int, Lines | None] = {}

    def at(self, rows: int, *, parts: int = 1) -> Trace:
        """Return the trace of a step of micro-batches of `rows`; of more than two parts, two are told.

        What more parts than two add is their share of the batch, which waits on the device, and that is counted.
        """
        parts = min(parts, 2)
        key = rows, parts
        if key not in self._traces:
            self._traces[key] = self._made(rows, parts)
        return self._traces[key]

    def exactly(self, rows: int, *, parts: int) -> Trace:
        """Return the same trace, traced at that size and on no line; `at` gives it from now on."""
        parts = min(parts, 2)
        self._traces[rows, parts] = self._by_itself(rows, parts)
        self._peaks.pop((rows, parts), None)
        return self._traces[rows, parts]

    def distrust_lines(self) -> None:
        """Trace every size by itself from now on: the step is not on the lines that were laid."""
        self._lines = {1: None, 2: None}
        self._traces, self._peaks = {}, {}

    def peak_bytes(self, rows: int, *, parts: int = 1) -> int:
        """Return the most bytes that live at once in that step; where that must be traced, what it takes at least.

        A peak is the largest of straight lines: more rows take no less than fewer do, and no less than the line through two smaller
        sizes says; fewer take their share of what more do. So most of what is too much is known without a dry run, and `at` tells the
        rest.
        """
        parts = min(parts, 2)
        if (rows, parts) in self._traces or self._lines_at(rows, parts) is not None:
            return self._peak(rows, parts)
        if parts == 1 and self._least is None:
            return self._peak(rows, parts)
        return self._least_bytes(rows, parts)

    def _least_bytes(self, rows: int, parts: int) -> int:
        smallest = rows if parts == 1 else self._second.get(rows, rows)
        found = [0 if self._least is None else self._least(smallest)]
        found += [
            least_bytes(trace, smallest) for (size, _), trace in self._traces.items() if size > rows and parts > 1
        ]
        known = sorted({size for size, of, _ in self._own if of == parts and size < rows})[-2:]
        if not known:
            return max(found)
        taken = [self._peak(size, parts) for size in known]
        more = 0.0
        if len(known) > 1 and known[0] >= _FIT[0] * self._unit:
            more = (taken[1] - taken[0]) / (known[1] - known[0]) * (rows - known[1])
        return max(*found, taken[-1] + max(int(more), 0))

    def _peak(self, rows: int, parts: int) -> int:
        if (rows, parts) not in self._peaks:
            self._peaks[rows, parts] = peak(self.at(rows, parts=parts)).bytes
        return self._peaks[rows, parts]

    def _made(self, rows: int, parts: int) -> Trace:
        lines = self._lines_at(rows, parts)
        if lines is None:
            return self._by_itself(rows, parts)
        return self._complete(lines.at(rows, parts=parts), rows=rows * parts)

    def _lines_at(self, rows: int, parts: int) -> Lines | None:
        """Return the lines that a size lies on; None for one that is traced by itself."""
        whole, small = parts == 1 and rows == self._rows, rows < _FIT[0] * self._unit
        uneven = parts > 1 and rows < _FEW * self._unit and self._second.get(rows, rows) < rows
        few = parts > 1 and parts not in self._lines and sum(of > 1 for _, of, _ in self._own) < _TRIED
        return None if whole or small or uneven or few else self._lines_of(parts)

    def _lines_of(self, parts: int) -> Lines | None:
        if parts not in self._lines:
            self._lines[parts] = None
            if self._rows >= _FEW * self._unit:
                sizes = [count * self._unit for count in _FIT]
                with suppress(MisalignedError):
                    self._lines[parts] = fit([self._traced(size, parts, size) for size in sizes])
        return self._lines[parts]

    def _by_itself(self, rows: int, parts: int) -> Trace:
        second = self._second.get(rows, rows) if parts > 1 else rows
        return self._complete(self._traced(rows, parts, second), rows=rows + (parts - 1) * second)

    def _traced(self, rows: int, parts: int, second: int) -> Trace:
        key = rows, parts, second
        if key not in self._own:
            self._own[key] = self._trace(*key)
        return self._own[key]

    def _complete(self, trace: Trace, *, rows: int) -> Trace:
        """Return the trace, which tells `rows` of the batch, with all of the batch and what libraries take."""
        whole = self._whole_batch(trace, rows=rows)
        return with_workspaces(whole) if self._workspaces else whole

    def _whole_batch(self, trace: Trace, *, rows: int) -> Trace:
        """Return the trace with the rows of the batch that it leaves out, which are on the device all the while."""
        missing = (self._rows - rows) * self._row_bytes
        if missing <= 0 or (self._holds_batch and trace.parts > 1):
            return trace
        taken = {event.storage for event in trace.events if isinstance(event, Take)}
        waiting = Take(storage=max(taken, default=0) + 1, bytes=missing, category="batch")
        return replace(trace, events=(Work(op="batch", phase="setup"), waiting, *trace.events))
