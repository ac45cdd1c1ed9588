"""Traces of one step at any size: dry runs at a few, straight lines for the others.

A dry run of one size takes a second or two. The peak of a step is no straight line in its rows, but the size of each allocation is.
Two dry runs of small sizes therefore give the trace of every larger size, allocation by allocation (`Interpolation`).
Lines hold only where the step runs the same operations at both sizes. Elsewhere each size gets a dry run of its own.

Every trace is then adjusted: memory outside the step is added, and operations that the real step skips are removed.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from lightning_unified.cost_model.backends import with_workspaces
from lightning_unified.cost_model.candidates import even_splits
from lightning_unified.cost_model.memory.lower_bound import least_bytes
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.rates.links import reduced_bytes
from lightning_unified.cost_model.trace.interpolation import Interpolation, MisalignedError
from lightning_unified.cost_model.trace.trace import Collective, Event, Passes, Take, Trace, Work

__all__ = ["TracedSizes", "adjusted"]

_FEW = 8  # units: smaller batches get no lines, and smaller micro-batches of unequal size get a dry run each
_TRIED = 3  # sizes of a split batch that get a dry run each, before lines give the others
_FIT = (
    2,
    4,
)  # units of the micro-batches that lines go through; a micro-batch of one unit broadcasts, so it fits no line


class TracedSizes:
    """The step under one combination of memory options, at the sizes that a search needs.

    The whole batch gets a dry run, and so do the first smaller sizes. Known sizes give a lower bound of larger ones, so the first size
    that can fit usually does. If several do not fit, further sizes lie on lines through two dry runs. Where there are no such lines,
    each size gets a dry run.

    A batch of 10 rows in three micro-batches runs as 4, 3 and 3 rows. Freed blocks of four rows' activations then do not suit three
    rows' activations: allocated memory is lower than for 4, 4 and 4, and reserved memory can be far higher. So small sizes get a dry run
    each, and `exactly` traces the second micro-batch at its own size.

    Args:
        trace_step: Traces a step, given the rows of the first micro-batch, the number of micro-batches, and the rows of the others.
        rows: Rows of the whole batch.
        unit: Rows that stay together.
        row_bytes: Bytes of one row of the batch.
        workspaces: Whether to count memory that libraries take for themselves.
        least: Returns a lower bound of the bytes for a number of rows, known from another combination of memory options.
        holds_batch: Whether a trace of several micro-batches holds the whole batch, as for a module with encoders.
        with_sampling: Adds the sampling before the step to a trace; None without.
        trace_whole: As `trace_step`, but a shorter last chunk of the loss counts as a whole one, so that bytes lie on lines; None for `trace_step`
            itself.
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
        with_sampling: Callable[[Trace], Trace] | None = None,
        trace_whole: Callable[[int, int, int], Trace] | None = None,
    ) -> None:
        self._trace_whole = trace_whole
        self._trace, self._least, self._holds_batch, self._with_sampling = trace_step, least, holds_batch, with_sampling
        self._rows, self._unit, self._row_bytes, self._workspaces = rows, unit, row_bytes, workspaces
        self._second = {split[0]: split[1] for split in even_splits(rows, unit=unit) if len(split) > 1}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._own: dict[tuple[int, int, int], Trace] = {}
        self._whole: dict[tuple[int, int], Trace] = {}
        self._peaks: dict[tuple[int, int], int] = {}
        self._lines: dict[int, Interpolation | None] = {}

    def at(self, micro_batch_size: int, *, num_micro_batches: int = 1) -> Trace:
        """Return the trace of a step in so many micro-batches of that size, which shows at most two.

        Further micro-batches add only their share of the batch, which waits on the device. The trace counts that share.
        """
        num_micro_batches = min(num_micro_batches, 2)
        key = micro_batch_size, num_micro_batches
        if key not in self._traces:
            self._traces[key] = self._made(*key)
        return self._traces[key]

    def exactly(self, micro_batch_size: int, *, num_micro_batches: int) -> Trace:
        """Return the trace from a dry run at that size, not from lines.

        `at` returns it from now on.
        """
        num_micro_batches = min(num_micro_batches, 2)
        key = micro_batch_size, num_micro_batches
        self._traces[key] = self._by_itself(*key)
        self._peaks.pop(key, None)
        return self._traces[key]

    @property
    def whole(self) -> Trace:
        """The dry run of the whole batch at once, without what is added to it."""
        return self._traced(self._rows, 1, self._rows)

    def even_traces(self, *, num_micro_batches: int) -> list[Trace]:
        """Return the dry runs so far of micro-batches of one size, each of two units or more."""
        return [
            trace
            for (size, of, second), trace in self._own.items()
            if of == num_micro_batches and size == second and size >= _FIT[0] * self._unit
        ]

    def distrust_lines(self) -> None:
        """Run every size dry from now on: the step does not follow the lines."""
        self._lines = {1: None, 2: None}
        self._traces, self._peaks = {}, {}

    def peak_bytes(self, micro_batch_size: int, *, num_micro_batches: int = 1) -> int:
        """Return the peak of live bytes in that step.

        The result is a lower bound if the peak needs another dry run.

        A peak is the maximum of straight lines. So more rows take at least as much as fewer rows, and at least as much as the line
        through two smaller sizes. Fewer rows take at least their share of a larger size. This rules out most sizes that are too large
        without a dry run.
        """
        num_micro_batches = min(num_micro_batches, 2)
        key = micro_batch_size, num_micro_batches
        if key in self._traces or self._lines_at(*key) is not None:
            return self._peak(*key)
        if num_micro_batches == 1 and self._least is None:
            return self._peak(*key)
        return self._least_bytes(*key)

    def _least_bytes(self, size: int, num_micro_batches: int) -> int:
        smallest = size if num_micro_batches == 1 else self._second.get(size, size)
        found = [0 if self._least is None else self._least(smallest)]
        found += [
            least_bytes(trace, smallest)
            for (larger, _), trace in self._traces.items()
            if larger > size and num_micro_batches > 1
        ]
        known = sorted({smaller for smaller, of, _ in self._own if of == num_micro_batches and smaller < size})[-2:]
        if not known:
            return max(found)
        taken = [self._peak(smaller, num_micro_batches) for smaller in known]
        more = 0.0
        if len(known) > 1 and known[0] >= _FIT[0] * self._unit:
            more = (taken[1] - taken[0]) / (known[1] - known[0]) * (size - known[1])
        return max(*found, taken[-1] + max(int(more), 0))

    def _peak(self, size: int, num_micro_batches: int) -> int:
        if (size, num_micro_batches) not in self._peaks:
            self._peaks[size, num_micro_batches] = peak(self.at(size, num_micro_batches=num_micro_batches)).bytes
        return self._peaks[size, num_micro_batches]

    def _made(self, size: int, num_micro_batches: int) -> Trace:
        lines = self._lines_at(size, num_micro_batches)
        if lines is None:
            return self._by_itself(size, num_micro_batches)
        return self._complete(lines.at(size), rows=size * num_micro_batches)

    def _lines_at(self, size: int, num_micro_batches: int) -> Interpolation | None:
        """Return the lines that give a size; None for a size that needs a dry run."""
        whole, small = num_micro_batches == 1 and size == self._rows, size < _FIT[0] * self._unit
        uneven = num_micro_batches > 1 and size < _FEW * self._unit and self._second.get(size, size) < size
        is_new = num_micro_batches > 1 and num_micro_batches not in self._lines
        few = is_new and sum(of > 1 for _, of, _ in self._own) < _TRIED
        return None if whole or small or uneven or few else self._lines_of(num_micro_batches)

    def _lines_of(self, num_micro_batches: int) -> Interpolation | None:
        if num_micro_batches not in self._lines:
            self._lines[num_micro_batches] = None
            if self._rows >= _FEW * self._unit:
                sizes = [count * self._unit for count in _FIT]
                with suppress(MisalignedError):
                    traces = [self._traced(size, num_micro_batches, size) for size in sizes]
                    if self._trace_whole is not None and any(map(_has_parts, traces)):
                        traces = [self._trace_whole(size, num_micro_batches, size) for size in sizes]
                    self._lines[num_micro_batches] = Interpolation(traces)
        return self._lines[num_micro_batches]

    def _by_itself(self, size: int, num_micro_batches: int) -> Trace:
        """Return the trace from a dry run at that size.

        All callers get one object, because replays are kept on it.
        """
        if (size, num_micro_batches) not in self._whole:
            second = self._second.get(size, size) if num_micro_batches > 1 else size
            traced = self._traced(size, num_micro_batches, second)
            self._whole[size, num_micro_batches] = self._complete(traced, rows=size + (num_micro_batches - 1) * second)
        return self._whole[size, num_micro_batches]

    def _traced(self, size: int, num_micro_batches: int, second: int) -> Trace:
        key = size, num_micro_batches, second
        if key not in self._own:
            self._own[key] = self._trace(*key)
        return self._own[key]

    def _complete(self, trace: Trace, *, rows: int) -> Trace:
        """Add the rest of the batch, the libraries' workspaces and the sampling before the step to a trace.

        The trace holds `rows` of the batch.
        """
        whole = self._whole_batch(trace, rows=rows)
        whole = with_workspaces(whole) if self._workspaces else whole
        return whole if self._with_sampling is None else self._with_sampling(whole)

    def _whole_batch(self, trace: Trace, *, rows: int) -> Trace:
        """Add the rows of the batch that the trace leaves out.

        They stay on the device during the whole step.
        """
        missing = (self._rows - rows) * self._row_bytes
        if missing <= 0 or (self._holds_batch and trace.num_micro_batches > 1):
            return trace
        taken = {event.storage for event in trace.events if isinstance(event, Take)}
        waiting = Take(storage=max(taken, default=0) + 1, bytes=missing, category="batch")
        return replace(trace, events=(Work(op="batch", phase="setup"), waiting, *trace.events))


def _has_parts(trace: Trace) -> bool:
    """Return whether one chunk of a loss stands for several."""
    return any(isinstance(event, Passes) and event.kernels > 1 for event in trace.events)


def adjusted(trace: Trace, *, updates: bool, reduction_bytes: int, reducing_ranks: int = 1) -> Trace:
    """Adjust a trace for memory outside the step and for operations that the real step skips.

    Args:
        trace: From a dry run.
        updates: Whether the step writes weights; if not, optimizer state and the optimizer step are removed.
        reduction_bytes: Bytes that the device holds during the whole step to average gradients over ranks; added as a workspace.
        reducing_ranks: Ranks over which gradients are summed after the last backward pass; 1 sums nothing.
    """
    trace = _with_all_reduce(_with_reduction(trace, reduction_bytes), ranks=reducing_ranks)
    return trace if updates else _without_optimizer(trace)


def _with_reduction(trace: Trace, count: int) -> Trace:
    """Add `count` bytes for the reduction over ranks, allocated before the step."""
    if not count:
        return trace
    taken = (event.storage for event in trace.events if isinstance(event, Take))
    scratch = Take(storage=max(taken, default=0) + 1, bytes=count, category="workspaces")
    return replace(trace, events=(Work(op="reduction over ranks", phase="setup"), scratch, *trace.events))


def _with_all_reduce(trace: Trace, *, ranks: int) -> Trace:
    """Add the reduction of all gradients over the ranks, before the update.

    It runs where the gradients lie, so it takes no memory but that of `_with_reduction`.
    """
    if ranks == 1:
        return trace
    begins = next(
        (at for at, event in enumerate(trace.events) if isinstance(event, Work) and event.phase != "setup"), 0
    )
    gradients = _gradients(trace.events[:begins]) or _gradients(
        trace.events
    )  # of the step before: as many again follow
    at = next((at for at, event in enumerate(trace.events) if _begins_update(event)), len(trace.events))
    summed = Collective("all-reduce", "optimizer step", sent=reduced_bytes(gradients, ranks=ranks), overlaps=False)
    return replace(trace, events=(*trace.events[:at], summed, *trace.events[at:]))


def _gradients(events: Sequence[Event]) -> int:
    return sum(event.bytes for event in events if isinstance(event, Take) and event.category == "gradients")


def _begins_update(event: Event) -> bool:
    return isinstance(event, Work) and event.phase == "optimizer step"


def _without_optimizer(trace: Trace) -> Trace:
    """Remove optimizer state and the optimizer step: this step does not write weights."""
    events: list[Event] = []
    left_out: set[int] = set()
    phase = "setup"
    for event in trace.events:
        if isinstance(event, Work):
            phase = event.phase
        elif isinstance(event, Take) and (phase == "optimizer step" or event.category == "optimizer state"):
            left_out.add(event.storage)
        if phase == "optimizer step" and isinstance(event, Work):
            continue
        if not isinstance(event, Work) and event.storage in left_out:
            continue
        events.append(event)
    return replace(trace, events=tuple(events))
