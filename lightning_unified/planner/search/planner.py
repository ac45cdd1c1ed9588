"""The planner: predict a step's memory and time, and choose the fastest step that fits.

`StepTraces` gives the trace of a step at any size, from dry runs. A model of the backend's allocator turns a trace into reserved bytes.
The cost model turns it into seconds. `search` then takes the combination of memory options and micro-batch size with the least seconds
among those that fit.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_unified.cost_model.memory.limit import fits_within
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.prediction import Prediction, counted_peak, summarise
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.calibration import Calibration, kind_of
from lightning_unified.cost_model.rates.cost import communication, sampling_seconds, split_seconds, step_seconds
from lightning_unified.cost_model.rates.links import Link
from lightning_unified.cost_model.search import Candidate, Choice, Option, Taken, search
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.hardware.allocators.settings import AllocatorSettings
from lightning_unified.planner.garbage import no_collection
from lightning_unified.planner.search.combinations import Combination, with_larger_chunks, with_usual_chunks
from lightning_unified.planner.search.compared import ComparedOptions
from lightning_unified.planner.search.larger_shares import Measured, in_last_blocks, larger_shares, most_gained
from lightning_unified.planner.search.longer_rows import LongerRows
from lightning_unified.planner.search.row_lengths import RowLengths
from lightning_unified.planner.search.step_traces import StepTraces

__all__ = ["Planner"]

_LEAST_TO_EXPAND = 2**30  # judgement: bytes of which the expandable segments' pages of 20 MiB waste little
_AMPLE = 0.97  # of the limit: with expandable segments, `fits_within` demands room of 2 % to 3 %
_ATTEMPTS = 3  # searches; each repetition runs without the lines that misled the one before


@dataclass(frozen=True, slots=True)
class _CorrectedBytes:
    """Bytes of steps by the model of the allocator, corrected by earlier measurements."""

    allocator: AllocatorSettings
    calibration: Calibration | None

    def taken(self, trace: Trace, *, limit: int) -> Taken:
        """Return the bytes that a step takes.

        At its limit, an allocator first returns cached blocks. A step just below the limit that may not fit takes the room too that it lacks.
        """
        replayed = allocator_peak(trace, settings=self.allocator)
        reserved = int(replayed.reserved * self._factor(trace))
        ample = _AMPLE * limit if self.allocator.expandable else limit
        if reserved > ample and self.fit(trace, limit=limit):
            reserved = min(reserved, limit)
        elif ample < reserved <= limit:
            reserved = int(reserved / _AMPLE) + 1
        return Taken(peak_bytes=counted_peak(trace, replayed).bytes, reserved_bytes=reserved)

    def fit(self, trace: Trace, *, limit: int) -> bool:
        """Return whether a step fits within `limit` bytes."""
        return fits_within(trace, int(limit / self._factor(trace)), settings=self.allocator)

    def _factor(self, trace: Trace) -> float:
        return 1.0 if self.calibration is None else self.calibration.peak_factor(_kind(trace))


class Planner:
    """Predicts and chooses for one module and one batch on one backend; every dry run is kept.

    Args:
        rates: The speeds of the machine. Without them `predict` gives no seconds; `choose` gets its own.
        calibration: Corrections from earlier runs on the machine; None corrects nothing.
        link: The link to the other devices of the step; None for a step on one device.
    """

    def __init__(
        self,
        traces: StepTraces,
        *,
        rates: Rates | None = None,
        calibration: Calibration | None = None,
        link: Link | None = None,
    ) -> None:
        self._traces, self._calibration, self._link = traces, calibration, link
        self._rates = None if rates is None else replace(rates, link=link)
        self._bytes = _CorrectedBytes(traces.counted.allocator, calibration)
        self._compared = ComparedOptions(traces)
        self._has_expanded = False
        self._begun = time.monotonic()

    def predict(self, combination: Combination, *, micro_batch_size: int | None = None) -> Prediction:
        """Predict a step under `combination`, from a dry run at exactly that size.

        A size of None means the whole batch.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        self._begun = time.monotonic()
        trace, num_micro_batches = self._traces.exactly(combination, micro_batch_size)
        return self._summary(trace, num_micro_batches=num_micro_batches)

    def fits(self, combination: Combination, *, micro_batch_size: int | None, limit: int) -> bool:
        """Return whether a step fits within `limit` bytes, corrected by earlier measurements.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        return self._bytes.fit(self._traces.exactly(combination, micro_batch_size)[0], limit=limit)

    def may_expand(self, *, limit: int) -> bool:
        """Return whether a run lets segments expand if its batch does not fit.

        It does on a CUDA device that holds the whole module, within `limit` bytes that are large enough.
        """
        is_whole = self._link is None or self._traces.counted.reducing_ranks > 1
        return self._traces.backend == "cuda" and is_whole and limit >= _LEAST_TO_EXPAND

    def expand_segments(self) -> None:
        """Predict from now on for a CUDA allocator whose segments expand, because the batch does not fit otherwise.

        Searches then compare all combinations, although the user's own may fit now.
        """
        self._has_expanded = True
        self._bytes = replace(self._bytes, allocator=replace(self._bytes.allocator, expandable=True))

    def fits_whole(self, own: Combination, *, limit: int) -> bool:
        """Return whether the batch fits within `limit` bytes in the fewest micro-batches that are allowed.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        fewest = self._traces.splits[0]
        return self._bytes.fit(self._traces.of(own).at(fewest[0], num_micro_batches=len(fewest)), limit=limit)

    def choose(
        self, combinations: Sequence[Combination], *, budget_bytes: int, rates: Rates, only_best: bool = False
    ) -> Choice:
        """Return the fastest combination and micro-batch size that fits.

        A dry run checks the size of a split batch.

        Args:
            combinations: The combinations to choose from, the user's own first, the one that needs least memory next.
            budget_bytes: Bytes that the run may use.
            rates: The speeds of the machine.
            only_best: Whether to trace only combinations that can win, by the bounds from the user's own step. The choice is the same and
                takes less time, but lists fewer alternatives.

        Raises:
            DryRunError: If the step cannot be traced.
        """
        rates = replace(rates, link=self._link)
        self._begun, self._rates = time.monotonic(), rates
        self._compared.begin()
        with no_collection():
            return self._chosen(combinations, budget_bytes=budget_bytes, rates=rates, only_best=only_best)

    def _chosen(
        self, combinations: Sequence[Combination], *, budget_bytes: int, rates: Rates, only_best: bool
    ) -> Choice:
        combinations = self._compared.that_differ(combinations)
        own = combinations[0]
        if not self._has_expanded and self.fits_whole(own, limit=budget_bytes):
            combinations = [one for one in combinations if one.loss_chunk == own.loss_chunk]  # as a run does
        searched = combinations
        if only_best and self._may_look_for_larger_chunks:
            searched = with_usual_chunks(combinations)
        for _ in range(_ATTEMPTS):
            options = (self._compared.promising if only_best else self._compared.in_order)(searched, rates=rates)
            choice = self._searched(options, combinations[0], budget_bytes=budget_bytes, rates=rates)
            choice = self._with_larger_chunk(choice, combinations, budget_bytes=budget_bytes, rates=rates)
            choice = self._with_larger_shares(choice, combinations, budget_bytes=budget_bytes, rates=rates)
            best = choice.best
            if best is None or best.num_micro_batches == 1:
                break
            sizes = self._traces.of(self.combination_of(best))
            trace = sizes.exactly(best.micro_batch_size, num_micro_batches=best.num_micro_batches)
            if self._bytes.fit(trace, limit=budget_bytes):
                break
            sizes.distrust_lines()
        return choice  # pyright: ignore[reportPossiblyUnboundVariable]

    def _with_larger_chunk(
        self, choice: Choice, combinations: Sequence[Combination], *, budget_bytes: int, rates: Rates
    ) -> Choice:
        """Return the choice with the largest loss chunk for which its best plan leaves room.

        A search ends after a number of operations, and may not have looked at it.
        """
        best = choice.best
        if best is None or not self._may_look_for_larger_chunks:
            return choice
        split = next(split for split in self._traces.splits if len(split) == best.num_micro_batches)
        for larger in with_larger_chunks(self.combination_of(best), combinations):
            compared = (replace(self.combination_of(best), always=True), larger)  # however long the first search took
            options = (replace(self._compared.option(one), split=split) for one in compared)
            found = self._searched(options, combinations[0], budget_bytes=budget_bytes, rates=rates)
            if found.best is not None and found.best != best:
                return found.beside(choice)  # smaller ones are slower
        return choice

    @property
    def _may_look_for_larger_chunks(self) -> bool:
        """Whether fewer loss chunks are worth another dry run each.

        They are on CUDA and HIP: 1.5 % of a step predicted, and less than 1 % on a simulated Mac (judgement).
        """
        return self._traces.backend in ("cuda", "rocm")

    def _with_larger_shares(
        self, choice: Choice, combinations: Sequence[Combination], *, budget_bytes: int, rates: Rates
    ) -> Choice:
        """Let the last compiled blocks keep a larger share where the best plan leaves room.

        A search compares shares that hold for all blocks.
        """
        best = choice.best
        if best is None:
            return choice
        own = self.combination_of(best)
        larger = larger_shares(own, combinations)
        if not larger or own.recompute is None or own.recompute.of is None:
            return choice
        split = next(split for split in self._traces.splits if len(split) == best.num_micro_batches)
        measured = partial(self._measured, split=split, budget_bytes=budget_bytes, rates=rates)
        room = int((_AMPLE if self._bytes.allocator.expandable else 1.0) * budget_bytes)
        each = ((share, measured(one)) for share, one in larger)
        wanted = most_gained(measured(own), each, blocks=own.recompute.of, room=room)
        if wanted is None:
            return choice
        compared = (*in_last_blocks(own, wanted), replace(own, always=True))
        options = (replace(self._compared.option(one), split=split) for one in compared)
        found = self._searched(options, combinations[0], budget_bytes=budget_bytes, rates=rates)
        return choice if found.best is None or found.best == best else found.beside(choice)

    def _measured(self, combination: Combination, *, split: Sequence[int], budget_bytes: int, rates: Rates) -> Measured:
        """Return what a step takes under `combination` if the batch is split as given."""
        sizes = self._traces.of(combination)
        taken = self._bytes.taken(sizes.at(split[0], num_micro_batches=len(split)), limit=budget_bytes)
        seconds = split_seconds(lambda rows, count: sizes.at(rows, num_micro_batches=count), split, rates)
        return Measured(bytes=taken.reserved_bytes, seconds=seconds)

    def _searched(self, options: Iterator[Option], own: Combination, *, budget_bytes: int, rates: Rates) -> Choice:
        return search(
            options,
            budget_bytes=budget_bytes,
            taken=partial(self._bytes.taken, limit=budget_bytes),
            rows=self._traces.rows,
            unit=self._traces.unit,
            least=self._traces.limits.least,
            micro_batch_size=self._traces.limits.micro_batch_size,
            rates=rates,
            alignment=None if self._calibration is None else self._calibration.alignment,
            own=self._compared.option(own),
            may_trace=self._compared.may_trace,
        )

    def combination_of(self, candidate: Candidate) -> Combination:
        """Return the combination of memory options of a candidate that `choose` found."""
        return self._compared.combination_of(candidate)

    def prediction_of(self, candidate: Candidate) -> Prediction:
        """Return the prediction for a candidate that `choose` found, within the bytes of the candidate."""
        sizes = self._traces.of(self.combination_of(candidate))
        trace = sizes.at(candidate.micro_batch_size, num_micro_batches=candidate.num_micro_batches)
        found = replace(self._summary(trace, num_micro_batches=candidate.num_micro_batches), seconds=candidate.seconds)
        return found.within(candidate.reserved_bytes) if candidate.fits else found

    @property
    def is_light(self) -> bool:
        """Whether its batch is a light copy, so that keeping the planner keeps no memory of the device."""
        return self._traces.is_light

    def lengths(self, combination: Combination) -> RowLengths:
        """Return the step under `combination` at any row length."""
        return RowLengths(self._traces, combination)

    def longer(self, combination: Combination) -> LongerRows:
        """Return the step of the whole batch under `combination` at longer rows."""
        return LongerRows(self._traces, combination)

    def within(self, trace: Trace, *, num_micro_batches: int, limit: int) -> Prediction | None:
        """Return the prediction for a traced step if it fits within `limit` bytes, else None."""
        self._begun = time.monotonic()
        if peak(trace).bytes > limit or not self._bytes.fit(trace, limit=limit):
            return None
        return self._summary(trace, num_micro_batches=num_micro_batches).within(limit)

    def could_be_aligned(self, choice: Choice) -> bool:
        """Return whether another split has aligned sizes and the choice has not.

        Aligned sizes are multiples of 64 or 8 positions.
        """
        best = choice.best
        if best is None or best.num_micro_batches == 1:
            return False
        sizes = self._traces.of(self.combination_of(best))
        trace = sizes.at(best.micro_batch_size, num_micro_batches=best.num_micro_batches)
        length = trace.length or 1
        coarse, fine = (multiple // math.gcd(multiple, length) for multiple in (64, 8))
        splits = {len(split): split for split in self._traces.splits}
        unaligned = any(rows % coarse for rows in splits.pop(best.num_micro_batches))
        return unaligned and any(
            num_micro_batches > best.num_micro_batches and not any(rows % fine for rows in split)
            for num_micro_batches, split in splits.items()
        )

    def kind(self, combination: Combination) -> str:
        """Return the name under which measurements correct predictions of this kind."""
        return kind_of(backend=self._traces.backend, precision=combination.precision, recomputes=combination.recomputes)

    def _summary(self, trace: Trace, *, num_micro_batches: int) -> Prediction:
        seconds = None if self._rates is None else step_seconds(trace, self._rates)
        found = summarise(
            trace,
            seconds=seconds if num_micro_batches <= 2 else None,
            generation_seconds=0.0 if self._rates is None else sampling_seconds(trace, self._rates),
            planning_seconds=time.monotonic() - self._begun,
            settings=self._bytes.allocator,
        )
        sent, busy = communication(trace, self._link, num_micro_batches=num_micro_batches)
        return replace(found, num_micro_batches=num_micro_batches, sent_bytes=sent, link_seconds=busy)


def _kind(trace: Trace) -> str:
    recompute = trace.options.get("recompute", "none")
    return kind_of(backend=trace.backend, precision=trace.options.get("precision", ""), recomputes=recompute != "none")
