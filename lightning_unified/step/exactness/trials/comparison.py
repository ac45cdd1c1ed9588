"""The runs of one check, and the comparison of whole and split gradients."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from lightning_unified.step.exactness.gradients import Disagreement, Tolerance, disagreement
from lightning_unified.step.exactness.losses import (
    LossRule,
    needed_summands,
    require_counts,
    share_of,
    shares,
    with_losses,
)
from lightning_unified.step.exactness.losses.summands import (
    REST,
    RunOfSummands,
    Summand,
    SummandFit,
    named_by_terms,
    possible_terms,
    sums_up,
)
from lightning_unified.step.exactness.trials.run import Run
from lightning_unified.step.results.merging import MicroBatchWeights

__all__ = ["Comparison", "SplitRuns", "Trial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The rows that a check runs, and their split.

    Args:
        kwargs: The arguments of `training_step`, the whole batch first.
        batch_rows: The number of rows of the batch.
        start: The first row that runs.
        rows: The number of rows that run.
        take: `take(batch, start, stop, rows=batch_rows)` returns rows `start` to `stop` of the batch.
        split: The rows of each micro-batch.
        is_quiet: Whether to run without dropout first, which takes a quarter of the time. The rows run
            with dropout only if the gradients do not agree without it, or the step draws random numbers nevertheless.
        of_summands: The loss rules that may hold for each summand of the loss, where none does for all of it.
    """

    kwargs: "OrderedDict[str, Any]"
    batch_rows: int
    start: int
    rows: int
    take: Callable[..., Any]
    split: Sequence[int]
    is_quiet: bool
    of_summands: Sequence[LossRule] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the batch run."""
        return self.rows == self.batch_rows

    def rows_from(self, start: int, size: int) -> Any:
        """Return `size` of the rows that run; `start` counts from the first of these."""
        batch, first = next(iter(self.kwargs.values())), self.start + start
        return self.take(batch, first, first + size, rows=self.batch_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRuns:
    """One split of the rows: the micro-batches, their sizes in rows, and their runs.

    Args:
        sizes: The rows of each micro-batch.
        batches: The micro-batches.
        runs: The run of each.
        scaled: Repeats the run of a micro-batch, given its index, a factor of the loss in the backward pass, and the summand of the
            loss that the pass differentiates.
    """

    sizes: Sequence[int]
    batches: Sequence[Any]
    runs: Sequence[Run]
    scaled: Callable[..., Run] | None = None

    def weights(self, rule: LossRule) -> MicroBatchWeights:
        """Return the micro-batches' weights under a rule."""
        terms = list(map(float, self.sizes)) if rule.adds else [one * sum(self.sizes) for one in self.shares(rule)]
        return MicroBatchWeights(self.sizes, terms)

    @property
    def not_finite(self) -> list[int]:
        """The rows of each micro-batch whose gradient is not finite."""
        pairs = zip(self.sizes, self.runs, strict=True)
        return [size for size, run in pairs if not run.gradient.squares.isfinite().all()]

    def counts(self, rule: LossRule) -> list[float]:
        """Return the number of terms of each micro-batch; its rows where none is counted."""
        is_counted = rule.count is not None and not rule.least
        return [*map(float, map(rule.count, self.batches) if is_counted and rule.count else self.sizes)]

    def shares(self, rule: LossRule) -> list[float]:
        """Return the factor of each micro-batch's loss."""
        if rule.count is not None:
            require_counts(rule, [float(rule.count(batch)) for batch in self.batches])
        return shares(rule, self.batches, self.sizes)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run over whole rows, compared with the runs over their micro-batches.

    Args:
        whole: The run over all rows.
        split: The runs over the micro-batches.
        repeated: Runs all rows once more, with the same random draws or none; given a summand, its backward pass differentiates that.
        troubles: The reasons why the random draws could not be replayed.
        is_drawn: Whether the whole run has drawn random numbers.
        is_ordered: Whether a draw had several entries per row, so that their order mattered.
        reads_summands: Whether the summands of the loss may have weights of their own.
        known: The disagreements computed so far, by the name of the loss rule.
    """

    whole: Run
    split: SplitRuns
    repeated: Callable[..., Run]
    troubles: Sequence[str] = ()
    is_drawn: bool = False
    is_ordered: bool = False
    reads_summands: bool = False
    known: dict[str, Disagreement] = field(default_factory=dict)

    @property
    def all_runs(self) -> Sequence[Run]:
        """The whole run, then the runs of the micro-batches."""
        return (self.whole, *self.split.runs)

    @property
    def initialized(self) -> list[str]:
        """The parameters that the step set before their first use, to other values for other rows."""
        norms: dict[str, list[float]] = {}
        for run in (self.whole, *self.split.runs):
            for name, norm in run.first_norms.items():
                norms.setdefault(name, []).append(norm)
        return [name for name, own in norms.items() if any(not math.isclose(one, own[0], rel_tol=1e-3) for one in own)]

    @property
    def moved_again(self) -> str | None:
        """A trained parameter that several runs wrote, each from the value of the run before; None without one."""
        moved = [name for run in self.all_runs for name in run.moved]
        return next((name for name in dict.fromkeys(moved) if moved.count(name) > 1), None)

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance for the coarsest number format of the runs."""
        return Tolerance.of(self._formats)

    @property
    def lowest(self) -> torch.dtype | None:
        """The coarsest format that rounded results of the runs: 16 bits or float32; None if all are in float64."""
        return next((one for one in (torch.bfloat16, torch.float16, torch.float32) if one in self._formats), None)

    @property
    def _formats(self) -> set[torch.dtype]:
        return {one for run in self.all_runs for one in run.formats}

    @property
    def says_nothing(self) -> str:
        """The reason why gradients cannot be compared; empty if they can.

        A whole gradient of zeros can be compared if a micro-batch has a gradient.
        """
        gradients = [run.gradient for run in self.split.runs]
        is_zero = self.whole.gradient.is_zero
        return "" if is_zero and any(not one.says_nothing for one in gradients) else self.whole.gradient.says_nothing

    def can_count(self, rule: LossRule) -> bool:
        """Return whether `rule` counts 0 or more terms in every micro-batch.

        A declared `loss_weight` is not tested here: `SplitRuns.shares` raises an error for a negative count.
        """
        if rule.count is None or rule.name == "loss_weight":
            return True
        return all(float(rule.count(batch)) >= 0 for batch in self.split.batches)

    def none_agrees(self, rules: Sequence[LossRule]) -> bool:
        """Return whether gradients differ by more than rounding under each of `rules`."""
        return all(self.off(rule).excess > 1 for rule in rules)

    def off(self, rule: LossRule) -> Disagreement:
        """Return the largest difference of gradients, whole and split, under `rule`."""
        if rule.name not in self.known:
            found = Disagreement(math.inf, math.inf, 0)
            if rule.summands:
                found = self._off_by_summands(rule) or found
            elif self.can_count(rule):
                pairs = zip(self.split.runs, self.split.shares(rule), strict=True)
                weighted = [(run.gradient, share) for run, share in pairs if share]
                found = disagreement(self.whole.gradient, weighted, self.tolerance)
            self.known[rule.name] = found
        return self.known[rule.name]

    def _off_by_summands(self, rule: LossRule) -> Disagreement | None:
        """Return the largest difference of gradients under a rule with weights for each summand; None without."""
        runs = self._summands_under(rule)
        keys = {one.key for one in rule.summands}
        if runs is None or any(not keys.issuperset(run.values) for run in runs):
            return None
        weighted = [
            (run.gradients[one.key], share)
            for one in rule.summands
            for run, share in zip(runs[1:], self.split.shares(one.first), strict=True)
            if share and one.key in run.gradients
        ]
        return disagreement(self.whole.gradient, weighted, self.tolerance)

    @cached_property
    def names_of_summands(self) -> Sequence[str]:
        """The names of the summands with a gradient; none where they may have no weights of their own."""
        if not self.reads_summands or self.split.scaled is None:
            return ()
        return [one.key for one in self.repeated("").summands if one.key != REST]

    @cached_property
    def summands(self) -> Sequence[RunOfSummands] | None:
        """The whole run and those of the micro-batches, by summand of the loss; None where it is not their sum."""
        keys, scaled = self.names_of_summands, self.split.scaled
        if not keys or scaled is None:
            return None
        repeats = [self.repeated, *(partial(scaled, index, 1.0) for index in range(len(self.split.sizes)))]
        found = [_by_summand(keys, repeat) for repeat in repeats]
        found = found if any(run.has_rest(self.tolerance) for run in found) else [run.without_rest() for run in found]
        plain = [run.gradient for run in self.all_runs]
        is_sum = all(sums_up(one, run, self.tolerance) for one, run in zip(plain, found, strict=True))
        return found if is_sum else None

    def rules_of_summands(self, candidates: Sequence[LossRule], known: LossRule | None) -> Iterator[LossRule]:
        """Yield the rules with weights for each summand under which all of them agree.

        There are none where the loss is not the sum of its summands.

        Args:
            candidates: The rules to try for each summand.
            known: The rule of the loss so far; its summands stay.
        """
        if (runs := self.summands) is None:
            return
        own = {} if known is None else {one.key: one.rules for one in known.summands}
        others = dict.fromkeys(runs[0].values, candidates) | {key: [*rules, *candidates] for key, rules in own.items()}
        # alike summands of which micro-batches lack some may be named in several ways, best as they were known
        ways = [*self._possible_terms({**others, **own}), *self._possible_terms(others), {}]
        for terms in ways:
            named = self._named(runs, terms) if terms else runs
            batches, sizes = self.split.batches, self.split.sizes
            fit = SummandFit(named[0], named[1:], batches, sizes, tolerance=self.tolerance, has_terms=terms)
            if (found := fit.rule(candidates, known)) is not None:
                yield found

    def _possible_terms(self, pools: Mapping[str, Sequence[LossRule]]) -> Iterator[dict[str, Sequence[bool]]]:
        """Yield in which micro-batches summands may have terms, by the rules that may hold for each."""

        def counted(key: str) -> list[list[float]]:
            return [self.split.counts(rule) for rule in pools[key] if self.can_count(rule)]

        return possible_terms((self.summands or ())[1:], pools, counted)

    def _named(self, runs: Sequence[RunOfSummands], terms: Mapping[str, Sequence[bool]]) -> Sequence[RunOfSummands]:
        """Return the runs by summand, alike ones named by the micro-batches in which they have terms."""
        always = [True] * len(self.split.sizes)
        own = {key: terms.get(key, always) for key in dict.fromkeys((*terms, *runs[0].values))}
        of_runs = [{key: has[at] for key, has in own.items()} for at in range(len(self.split.sizes))]
        of_whole = {key: any(has) for key, has in own.items()}
        return [named_by_terms(run, has) for run, has in zip(runs, [of_whole, *of_runs], strict=True)]

    def _summands_under(self, rule: LossRule) -> Sequence[RunOfSummands] | None:
        """Return the runs by summand, as a rule's terms name them; None where the loss is not their sum."""
        if self.summands is None:
            return None
        return self._named(self.summands, needed_summands(rule, self.split.batches))

    def weights(self, rule: LossRule) -> MicroBatchWeights:
        """Return the micro-batches' weights under a rule, by which their results merge."""
        weights, runs = self.split.weights(rule), self._summands_under(rule) if rule.summands else None
        if runs is None:
            return weights
        factors = {one.key: self.split.shares(one.first) for one in rule.summands}
        losses = [
            share_of(
                {key: torch.tensor(value, dtype=torch.float64) for key, value in run.values.items()},
                {key: of[index] for key, of in factors.items()},
            )
            for index, run in enumerate(runs[1:])
        ]
        return with_losses(weights, [*factors.values()], losses)


def _by_summand(keys: Sequence[str], repeat: Callable[..., Run]) -> RunOfSummands:
    """Run some rows once for each summand of the loss.

    A summand with the factor 0 that is not among `keys` is left out: a step may have it in place of a mean over no rows.
    """
    runs = {key: repeat(only=key) for key in keys}
    summands = [one for one in runs[keys[0]].summands if one.key in (*keys, REST) or not _adds_nothing(one)]
    return RunOfSummands(
        gradients={key: run.gradient for key, run in runs.items()},
        values={one.key: float(one.value) for one in summands if one.value is not None},
        divisors={one.key: float(one.divisor) for one in summands if one.divisor is not None},
        zeros={one.key for one in summands if one.is_zero},
    )


def _adds_nothing(one: Summand) -> bool:
    """Return whether a summand is multiplied by the number 0, and is 0."""
    return one.is_zero and one.value is not None and float(one.value) == 0
