"""Search for the plan of least predicted step time within a budget.

The search takes options (settings of the memory options) and, for each, splits of the batch from few micro-batches to many.
It keeps the first split that fits, because fewer micro-batches are never slower: each adds launches and costs that do not
depend on its rows. Four bounds keep it from tracing options that cannot win:

- A peak of live bytes above the budget excludes a split without a replay of the allocator, which never reserves less.
- A lower bound of the step time (`Option.least_seconds`) excludes an option that is slower than a plan that fits.
- An option that recomputes less and fits in as many micro-batches excludes one that recomputes more.
- An option that is far slower than a plan that fits, by its lower bound, is left out if another that fits differs in the loss chunk only.

A caller may limit the work of a long search (`may_trace`). An option that could be much faster than the best plan so far is worth more of it.

The set of splits and their figures do not depend on the budget. A larger budget only admits more of them, and so never gives
a slower plan.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lightning_unified.cost_model.candidates import Candidate, Choice, Option, Sizes, Taken, even_splits, what_would_fit
from lightning_unified.cost_model.rates import Alignment, Rates
from lightning_unified.cost_model.rates.cost import split_seconds, waiting_seconds
from lightning_unified.cost_model.trace.trace import Trace
from lightning_unified.units import format_bytes, format_duration

__all__ = ["Candidate", "Choice", "Option", "Sizes", "Taken", "search", "what_would_fit"]

_EQUAL_IN = ("precision", "optimizer_kernel", "attention")  # of two options of which one recomputes more
_FAR = 1.1  # judgement: among alternatives that are slower by this factor or more, loss chunks do not matter
_WAITS = 0.25  # judgement: a smaller share of a step in which the GPU waits is not worth a word
_EQUAL = 1 + 1e-9  # sums of the same seconds in another order


def search(
    options: Iterable[Option],
    *,
    budget_bytes: int,
    taken: Callable[[Trace], Taken],
    rows: int,
    rates: Rates,
    unit: int = 1,
    least: int = 1,
    micro_batch_size: int | None = None,
    alignment: Alignment | None = None,
    own: Option | None = None,
    may_trace: Callable[[float], bool] = lambda _: True,
) -> Choice:
    """Return the plan of least predicted step time within the budget.

    Each option is split into as few micro-batches as fit. If sizes of some multiple are measurably faster, the fewest
    micro-batches of such a size are considered too.

    Args:
        options: Settings to choose from, the user's own first unless `own` is given.
        budget_bytes: Bytes the run may use.
        taken: Function that returns the bytes a step takes, calibrated or not; never less than `peak_bytes` of its traces.
        rows: Number of rows of the whole batch.
        rates: Speeds of the machine.
        unit: Rows that stay together (`MicroBatchRules.unit`); `rows` for a batch that cannot be split.
        least: Least number of rows of a micro-batch.
        micro_batch_size: Largest micro-batch that the user allows, in rows; None allows any.
        alignment: Gain of aligned sizes on the machine; None considers no alignment.
        own: The user's own option, if it is not the first.
        may_trace: Returns whether the search may still look at an option that is not one to look at always. It is given how many times as
            fast as the best plan so far the option could be, by its lower bound; 1 if that is unknown.

    Raises:
        ValueError: If there is no option, or a number of rows is not positive.
    """
    splits = even_splits(rows, unit=unit, least=least, micro_batch_size=micro_batch_size)
    measure = _Measure(budget_bytes=budget_bytes, taken=taken, rates=rates, alignment=alignment)
    fitting: list[tuple[Option, Candidate]] = []
    short: list[Candidate] = []
    first, multiple = own, None
    asked: dict[int, Option] = {}
    for option in options:
        first = first or option
        multiple = multiple or measure.rows_that_align(first, splits)
        if option.split is not None:
            asked[id(option.traces)] = option
            if measure.is_late(option, fitting):
                break
        is_open = option.always or may_trace(measure.could_gain(option, fitting, splits))
        if not is_open or measure.only_repeats(option, fitting, splits):
            continue
        left = _splits_left(option, splits, fitting, multiple=multiple)
        if not left or (fitting and measure.is_beaten(option, left, by=min(plan.seconds for _, plan in fitting))):
            continue
        plans = measure.best_plans(option, left, multiple=multiple)
        if not plans and left == splits:
            plans = [measure.smallest(option, splits, multiple=multiple)]
        fitting += [(option, plan) for plan in plans if plan.fits]
        short += [plan for plan in plans if not plan.fits]
    if not fitting:
        short += [measure.smallest(option, splits, multiple=multiple or 1) for option in asked.values()]
    if first is None:
        raise ValueError("a search needs at least one option; give the user's own settings as one.")
    short.sort(key=lambda plan: plan.reserved_bytes)
    if not fitting:
        return Choice(best=None, alternatives=tuple(short), reason=_refusal(short, budget_bytes))
    best, *others = _ranked(fitting)
    whole = _peak(first, splits[0])
    reason = _reason(best, others, budget_bytes=budget_bytes, own_bytes=whole, own=first, splits=splits)
    return Choice(best=best, alternatives=(*others, *short), reason=reason)


def _ranked(fitting: list[tuple[Option, Candidate]]) -> list[Candidate]:
    """Return the plans that fit, fastest first.

    Equally fast plans follow by their number of changes, then of micro-batches, then of bytes.
    """
    fitting = sorted(fitting, key=lambda pair: pair[1].seconds)
    fastest = fitting[0][1].seconds * _EQUAL

    def rank(pair: tuple[Option, Candidate]) -> tuple[float, ...]:
        option, plan = pair
        return max(plan.seconds, fastest), option.changes, plan.num_micro_batches, plan.reserved_bytes, plan.peak_bytes

    return [plan for _, plan in sorted(fitting, key=rank)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measure:
    """Prices of options at the splits of one batch: bytes reserved and seconds."""

    budget_bytes: int
    taken: Callable[[Trace], Taken]
    rates: Rates
    alignment: Alignment | None

    def best_plans(self, option: Option, splits: list[tuple[int, ...]], *, multiple: int) -> list[Candidate]:
        """Return the fitting plan with fewest micro-batches, and the fewest aligned ones.

        Live bytes are quick to compute, and the allocator never reserves less. So the allocator is replayed only if the live
        bytes fit.
        """
        found: list[Candidate] = []
        for split in splits:
            aligned = _is_aligned(split, multiple)
            if (found and not aligned) or _peak(option, split) > self.budget_bytes:
                continue
            plan = self._plan(option, split)
            if plan.fits:
                found.append(self._timed(plan, option, split, aligned=aligned))
                if aligned:
                    break
        return found

    def is_late(self, option: Option, fitting: list[tuple[Option, Candidate]]) -> bool:
        """Return whether an option, and all after it, are slower than a plan that fits."""
        if option.split is None or option.least_seconds is None or not fitting:
            return False
        return option.least_seconds(len(option.split)) > min(plan.seconds for _, plan in fitting) * _EQUAL

    def could_gain(
        self, option: Option, fitting: list[tuple[Option, Candidate]], splits: list[tuple[int, ...]]
    ) -> float:
        """Return how many times as fast as the best plan that fits an option could be, by its lower bound.

        The result is 1 if no plan fits yet, or if no bound is known.
        """
        least = 0.0 if option.least_seconds is None else option.least_seconds(len(option.split or splits[0]))
        return max(min(plan.seconds for _, plan in fitting) / least, 1.0) if fitting and least > 0 else 1.0

    def only_repeats(
        self, option: Option, fitting: list[tuple[Option, Candidate]], splits: list[tuple[int, ...]]
    ) -> bool:
        """Return whether an option is far slower than the best plan, and much like one that fits.

        They differ only in their loss chunks. Such a plan would only be one more alternative like another.
        """
        if option.split is not None or option.least_seconds is None or not fitting:
            return False
        is_far = option.least_seconds(len(splits[0])) > min(plan.seconds for _, plan in fitting) * _FAR
        return is_far and any(
            option.recompute == by.recompute and all(getattr(option, name) == getattr(by, name) for name in _EQUAL_IN)
            for by, _ in fitting
        )

    def smallest(self, option: Option, splits: list[tuple[int, ...]], *, multiple: int) -> Candidate:
        """Return the plan with the smallest micro-batches."""
        split = splits[-1]
        return self._timed(self._plan(option, split), option, split, aligned=_is_aligned(split, multiple))

    def is_beaten(self, option: Option, splits: list[tuple[int, ...]], *, by: float) -> bool:
        """Return whether an option's fewest micro-batches neither fit nor would beat `by` seconds.

        More micro-batches are only slower. This excludes an option before its further splits are traced, which is most of the
        work.
        """
        fewest = splits[0]
        is_known = option.split is None  # otherwise the peak may be a lower bound only, and enough
        if len(splits) == 1 or (not is_known and _peak(option, fewest) > self.budget_bytes):
            return False
        if self._seconds(option, fewest, self.rates) <= by * _EQUAL:
            return False
        return _peak(option, fewest) > self.budget_bytes or not self._plan(option, fewest).fits

    def rows_that_align(self, option: Option, splits: list[tuple[int, ...]]) -> int:
        """Return the multiple of rows that gains speed.

        A row of the batch is `length` rows of a matrix product.
        """
        if self.alignment is None or self.alignment.multiple == 1:
            return 1
        length = option.traces.at(splits[0][0], num_micro_batches=len(splits[0])).length or 1
        return self.alignment.multiple // math.gcd(self.alignment.multiple, length)

    def _plan(self, option: Option, split: tuple[int, ...]) -> Candidate:
        """Return a plan without its time."""
        taken = self.taken(option.traces.at(split[0], num_micro_batches=len(split)))
        return Candidate(
            micro_batch_size=split[0],
            num_micro_batches=len(split),
            recompute=option.recompute,
            precision=option.precision,
            optimizer_kernel=option.optimizer_kernel,
            loss_chunk=option.loss_chunk,
            attention=option.attention,
            peak_bytes=taken.peak_bytes,
            reserved_bytes=taken.reserved_bytes,
            seconds=float("inf"),
            fits=taken.reserved_bytes <= self.budget_bytes,
        )

    def _timed(self, plan: Candidate, option: Option, split: tuple[int, ...], *, aligned: bool) -> Candidate:
        rates = self.rates if aligned or self.alignment is None else self.rates.slowed(self.alignment.gain)
        seconds = self._seconds(option, split, rates)
        return replace(plan, seconds=seconds, waiting_seconds=waiting_seconds(_at(option), split, rates))

    @staticmethod
    def _seconds(option: Option, split: tuple[int, ...], rates: Rates) -> float:
        least = 0.0 if option.least_seconds is None else option.least_seconds(len(split))
        return max(split_seconds(_at(option), split, rates), least)


def _at(option: Option) -> Callable[[int, int], Trace]:
    return lambda rows, num_micro_batches: option.traces.at(rows, num_micro_batches=num_micro_batches)


def _peak(option: Option, split: tuple[int, ...]) -> int:
    return option.traces.peak_bytes(split[0], num_micro_batches=len(split))


def _is_aligned(split: tuple[int, ...], multiple: int) -> bool:
    return all(rows % multiple == 0 for rows in split)


def _splits_left(
    option: Option, splits: list[tuple[int, ...]], fitting: list[tuple[Option, Candidate]], *, multiple: int
) -> list[tuple[int, ...]]:
    """Return the splits with which an option could beat the plans that fit.

    An option that recomputes more than a fitting option, and is otherwise equal, is slower in as many micro-batches or more. If the option is only searched while it can win, those splits are left out. Splits with more micro-batches than a
    fitting one of the same option are left out too, unless they are aligned and that one is not.
    """
    fewest = len(splits[-1]) + 1
    for by, plan in fitting:
        is_slower = all(getattr(option, name) == getattr(by, name) for name in _EQUAL_IN) and _does_more(option, by)
        split = next(split for split in splits if len(split) == plan.num_micro_batches)
        if is_slower and (plan.num_micro_batches == 1 or (option.split is not None and _is_aligned(split, multiple))):
            fewest = min(fewest, plan.num_micro_batches)
        if option.split is not None and option.traces is by.traces:
            gains = _is_aligned(option.split, multiple) and not _is_aligned(split, multiple)
            fewest = fewest if gains else min(fewest, plan.num_micro_batches)
    return [split for split in splits if len(split) < fewest and option.split in (None, split)]


def _does_more(option: Option, by: Option) -> bool:
    """Return whether an option recomputes more than another with the same loss.

    If it is only searched while it can win, also return whether it has smaller loss chunks and recomputes as much or more.
    """
    if option.loss_chunk == by.loss_chunk:
        return option.again > by.again
    if option.split is None or option.loss_chunk is None or by.loss_chunk is None or option.loss_chunk > by.loss_chunk:
        return False
    return option.recompute == by.recompute or option.again > by.again


def _refusal(short: list[Candidate], budget_bytes: int) -> str:
    least = "; ".join(f"{plan.describe()} needs {format_bytes(plan.reserved_bytes)}" for plan in short[:3])
    return f"no plan fits into {format_bytes(budget_bytes)}: {least}"


def _reason(
    best: Candidate,
    others: list[Candidate],
    *,
    budget_bytes: int,
    own_bytes: int,
    own: Option,
    splits: list[tuple[int, ...]],
) -> str:
    text = (
        f"{best.describe()}: {format_duration(best.seconds)} a step predicted, {format_bytes(best.reserved_bytes)} of "
        f"{format_bytes(budget_bytes)}"
    )
    if best.waiting_seconds > _WAITS * best.seconds:
        text += f"; in {format_duration(best.waiting_seconds)} of a step the GPU waits for the host"
        trace = own.traces.at(splits[0][0], num_micro_batches=len(splits[0]))
        if trace.backend == "cuda" and not trace.replayed:
            text += ", which the callback CudaGraphs can avoid"
    if others:
        text += f"; next, {others[0].describe()}: {format_duration(others[0].seconds)}"
    if own_bytes > budget_bytes:
        text += (
            f"; {'the whole batch' if len(splits[0]) == 1 else f'{splits[0][0]} rows'} at once, activation checkpointing: {own.recompute}, "
            f"would take {format_bytes(own_bytes)} or more"
        )
    return text
