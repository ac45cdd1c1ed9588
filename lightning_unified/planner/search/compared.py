"""The options that a search compares: which ones, and in which order."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.search import Candidate, Option
from lightning_unified.planner.search.bounds import Bounds
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.step_traces import StepTraces

__all__ = ["ComparedOptions", "is_under"]

# Operations in the dry runs of one choice; after that, only combinations to look at always, and those that could be much faster, are looked
# at. About four seconds on a laptop's core. Operations are counted in place of seconds so that a busy machine chooses as an idle one does.
_MOST_OPERATIONS = 16_000
_TIMES_COMPILED = 2  # judgement: compiled blocks have more policies to compare, and pay only in runs that are long


class ComparedOptions:
    """Combinations of memory options as a search takes them.

    Args:
        traces: The traces of the step.
    """

    def __init__(self, traces: StepTraces) -> None:
        self._traces = traces
        self._combinations: dict[tuple[Any, ...], Combination] = {}
        self._before, self._most = 0, _MOST_OPERATIONS
        self._known: dict[Combination, Bounds] = {}

    def begin(self) -> None:
        """Begin a search: count its operations from here, and compute its bounds anew."""
        self._before, self._most, self._known = self._traces.operations, _MOST_OPERATIONS, {}

    def combination_of(self, candidate: Candidate) -> Combination:
        """Return the combination of a candidate that a search took from here."""
        return self._combinations[_key(candidate)]

    def that_differ(self, combinations: Sequence[Combination]) -> list[Combination]:
        """Leave out other kinds of attention if the user's own step has no attention."""
        own, fewest = combinations[0], self._traces.splits[0]
        kinds = {one.attention for one in combinations}
        if len(kinds) == 1 or self._traces.of(own).at(fewest[0], num_micro_batches=len(fewest)).attends:
            return list(combinations)
        return [one for one in combinations if one.attention == own.attention]

    def in_order(self, combinations: Sequence[Combination], *, rates: Rates) -> Iterator[Option]:
        """Yield all combinations in their order."""
        is_compiled = any(one.recompute is not None and one.recompute.kept is not None for one in combinations)
        self._most = _MOST_OPERATIONS * (_TIMES_COMPILED if is_compiled else 1)
        for combination in combinations:
            bounds = self._bounds(combinations[0], combination)
            self._traces.of(combination, bounds=bounds)  # its bytes have a lower bound
            yield self.option(combination, least=bounds.seconds(combination, rates=rates))

    def promising(self, combinations: Sequence[Combination], *, rates: Rates) -> Iterator[Option]:
        """Yield combinations and splits in the order of their lower bounds of seconds."""
        splits = self._traces.splits
        bounds = [self._bounds(combinations[0], one) for one in combinations]
        least = [each.seconds(one, rates=rates) for each, one in zip(bounds, combinations, strict=True)]
        options = []
        for one, seconds, each in zip(combinations, least, bounds, strict=True):
            self._traces.of(one, bounds=each)  # its bytes have a lower bound
            options.append(self.option(one, least=seconds))
        waiting = [(seconds(len(splits[0])), index, 0) for index, seconds in enumerate(least)]
        heapq.heapify(waiting)
        while waiting:
            _, index, at = heapq.heappop(waiting)
            yield replace(options[index], split=splits[at])
            if at + 1 < len(splits):
                heapq.heappush(waiting, (least[index](len(splits[at + 1])), index, at + 1))

    def _bounds(self, own: Combination, combination: Combination) -> Bounds:
        own = replace(own, attention=combination.attention)
        if own not in self._known:
            self._known[own] = self._traces.bounds(own)
        return self._known[own]

    def may_trace(self, gain: float) -> bool:
        """Return whether a search may still look at an option.

        The option could be `gain` times as fast as the best plan so far.
        """
        return self._traces.operations - self._before <= self._most * gain

    def option(self, combination: Combination, *, least: Callable[[int], float] | None = None) -> Option:
        """Return what a search needs to know of a combination.

        Args:
            combination: The memory options.
            least: Lower bounds of the seconds of a step, by the number of its micro-batches.
        """
        option = Option(
            traces=self._traces.of(combination),
            recompute="none" if combination.recompute is None else str(combination.recompute),
            again=combination.again,
            precision=combination.precision,
            optimizer_kernel=combination.optimizer_kernel,
            loss_chunk=combination.loss_chunk,
            attention=combination.attention,
            changes=combination.changes,
            least_seconds=least,
            always=combination.always,
        )
        self._combinations[_key(option)] = combination
        return option


def is_under(combination: Combination, candidate: Candidate) -> bool:
    """Return whether a candidate of a search runs under `combination`."""
    recompute = "none" if combination.recompute is None else str(combination.recompute)
    return _key(candidate) == (
        recompute,
        combination.precision,
        combination.optimizer_kernel,
        combination.loss_chunk,
        combination.attention,
    )


def _key(one: Candidate | Option) -> tuple[Any, ...]:
    return one.recompute, one.precision, one.optimizer_kernel, one.loss_chunk, one.attention
