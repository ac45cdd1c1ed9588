"""The exactness check of validation, test and predict steps.

These steps have no gradient to compare. The check runs some rows whole and in micro-batches, and compares outputs, logs, metrics and
written state. A check runs:

1. before the first split batch of a stage, and before split batches 2, 4, 8, …;
2. before a batch with new facts (`facts.profile`), or with more rows than all before;
3. if the step gave a result that no check has seen.

It runs a few rows. The first check, those of a batch with more rows, of rows that share an id, of state with an entry for each row, and of a
result that no check has seen, also compare all rows with the batch's own micro-batches, or as many as fit: a step may compute with a fixed
number of rows (`z[:8]`, `losses.topk(10)`).

Predictions must have one entry per row, in the order of the rows. A prediction is refused unless one concatenation is the only rule that
fits, or all fitting rules give the same result.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.facts.carried import OF_ALL_ROWS, CarriedRows
from lightning_unified.step.exactness.facts.decisions import Decisions
from lightning_unified.step.exactness.facts.profile import BatchProfiles, facts_of
from lightning_unified.step.exactness.gradients import Tolerance
from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.losses import LossRule, candidates, declared, may_count, shares
from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.exactness.trials.evaluation_runs import EvaluationRuns, EvaluationTrial
from lightning_unified.step.exactness.trials.evaluation_sizes import EvaluationSizes
from lightning_unified.step.exactness.trials.learning import (
    equal_unless_drawn,
    learn_results,
    note_drawn,
    without_varying,
)
from lightning_unified.step.exactness.trials.refusals import EVALUATION_HOOKS, refusal_of_predictions, refusal_of_state
from lightning_unified.step.recovery.measured_room import MeasuredRoom
from lightning_unified.step.results.merging import MicroBatchWeights, merged
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.trees import all_values
from lightning_unified.step.split import BatchSplitter

__all__ = ["EvaluationCheck"]

log = logging.getLogger("lightning_unified")

_ROUNDING = 1e-6  # relative; the rounding of a mean of equal values
_CHANCES = 3  # judgement: batches whose alike values may fit several weights by chance


class EvaluationCheck:
    """Finds the merge rules of one evaluation stage.

    Args:
        trainer: The Trainer that evaluates.
        rules: The rules that the module declares for its batches in this stage.
        splitter: Splits the batches of the stage.
        loader: The index of their loader.
        phase: `"validation"`, `"test"` or `"predict"`. Micro-batches of predictions are weighted by rows only.
        room: Tells whether more rows fit.
        group: The processes that run each check.

    Attributes:
        tables: The merge rules found.
        rule: The loss rule that weights means.
        ambiguous: The names of logs for which a check of their own batch left several results.
        decisions: The decisions of the step by values of its rows.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        rules: MicroBatchRules,
        splitter: BatchSplitter,
        loader: int,
        phase: str,
        room: MeasuredRoom,
        group: CheckGroup,
    ) -> None:
        self._module, self._rules, self._phase = trainer.lightning_module, rules, phase
        self._trimming = partial(splitter.trimming_if_needed, anywhere=group.anywhere, loader=loader)
        self._group = group
        self._runs = EvaluationRuns(trainer, partial(splitter.split, loader=loader), group=group)
        self._sizes = EvaluationSizes(self._runs, room, group)
        self.tables = Tables.of(rules.merge)
        self._carried = CarriedRows(self.tables.written)
        self.rule = LossRule("rows")
        self._profiles = BatchProfiles()
        self._batches = self._checks = self._checked_at = 0
        self._largest = 0  # rows of a checked batch
        self._rivals: dict[LossRule, set[str]] = {}  # each with the logs that it weights
        self._refuted: set[LossRule] = set()
        self._chances: Counter[str] = Counter()
        self._is_compared = False  # the batch at hand, with its own micro-batches
        self.ambiguous: set[str] = set()
        self.decisions = Decisions(trainer.lightning_module, decides=True)  # there is no graph of a loss
        self._all_rows_at = 0
        self._said: set[str] = set()

    def look(self, step: Callable[[Any], Any], own: Request, *, likely: LossRule, now: tuple[int, int]) -> None:
        """Check a batch before it runs in micro-batches, if that is due.

        Args:
            step: Runs the stage's step on a batch.
            own: The whole batch.
            likely: The loss rule by which training weights micro-batches.
            now: The epoch, and the number of the batch in it.

        Raises:
            SplitError: If the step fails on some rows only, or writes state that no rule merges.
        """
        self._batches += 1
        self._is_compared = False
        facts = facts_of(own.batch, own.rows) | self._carried.facts(now, own.rows)
        own = replace(own, facts=facts | {("micro-batches", "least", own.least)})
        news = self._profiles.news(own.facts)
        if own.rows > self._largest or any(kind in OF_ALL_ROWS for _, kind, _ in news):
            own = replace(own, micro_batches=own.sizes)

        def is_due() -> bool:
            is_scheduled = self._batches & (self._batches - 1) == 0 and self._checked_at != self._batches
            has_news = bool(self._profiles.news(own.facts)) or own.rows > self._largest
            return has_news or is_scheduled or not may_count(self.rule, own.batch)

        self.learn(step, own, likely=likely, is_due=is_due)

    def see_decisions(
        self, step: Callable[[Any], Any], own: Request, *, likely: LossRule, facts: frozenset[Any]
    ) -> None:
        """Check a batch whose micro-batches decided otherwise than those of all batches before.

        The arguments are those of `look`; `own` asks for all rows, and `facts` are those about the decisions.
        """
        is_seen = self._all_rows_at == self._batches
        own = replace(own, facts=facts)
        self.learn(step, own, likely=likely, is_due=lambda: not is_seen and bool(self._profiles.news(facts)))
        self._profiles.add(facts)

    def learn(self, step: Callable[[Any], Any], own: Request, *, likely: LossRule, is_due: Callable[[], bool]) -> bool:
        """Check a batch now if that is due, and those of other processes; return whether any was.

        The arguments are those of `look`; `is_due` returns whether a check of this process's batch is due.
        """
        is_done = has_checked = False
        while (asked := self._group.next(own, asks=not is_done and is_due())) is not None:
            known, learn = self.tables.paths, partial(self._learn, asked, likely)
            units = self._agreed(asked, partial(self._sizes.few, step, asked, learn))
            most = units if asked.micro_batches else 0  # units that ran in the batch's own micro-batches
            # what few rows do alike, such as `x[:16]`, all rows may do in another way
            is_new = self._group.anywhere(self._checks > 0 and not self.tables.paths <= known)
            if units and (asked.micro_batches or is_new):
                of_all = replace(asked, micro_batches=asked.micro_batches or asked.sizes)
                done = self._agreed(asked, partial(self._sizes.more, step, of_all, learn, done=units))
                most = done if done > units else most
                self._all_rows_at = self._batches
            self._largest = max(self._largest, asked.rows)
            self._profiles.add(asked.facts)
            self._checked_at, has_checked, self._checks = self._batches, True, self._checks + 1
            self._is_compared |= asked is own and most * asked.unit == asked.rows
            is_done = is_done or asked is own
        return has_checked

    def _agreed(self, asked: Request, compare: Callable[[], int]) -> int:
        """Return the result of `compare`, unless it or that of another process is a refusal."""

        def compared() -> int:
            units, refusal = 0, None
            try:
                units = compare()
            except SplitError as error:
                refusal = error
            self._group.agreed("gradients are not compared" if refusal is None else refusal, ())
            return units

        return self._trimming(asked.batch, compared)

    @property
    def compared(self) -> int:
        """The rows of the largest comparison so far."""
        return self._sizes.compared

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers.

        Results then differ from the whole batch's as under another seed.
        """
        return self._runs.has_drawn

    @property
    def leaves_gradients(self) -> bool:
        """Whether the step leaves gradients of the module's parameters, which nothing merges."""
        return self._runs.leaves_gradients

    def undecided(self, micro_batches: Sequence[Any], sizes: Sequence[int]) -> set[str]:
        """Return the names of logs that loss rules weight differently here, all of which fit."""
        own = self._shares(self.rule, micro_batches, sizes)
        names: set[str] = set()
        for rule, paths in self._rivals.items():
            other = self._shares(rule, micro_batches, sizes)
            if own is not None and other is not None and not _are_close(own, other):
                names |= paths
        return names

    def left(self, names: set[str]) -> set[str]:
        """Return the undecided logs that are not `ambiguous` and that no check of this batch decides.

        A check of this batch with its own micro-batches decides. Where values are alike, other weights fit by chance. So this holds for
        the first few batches of each log, as each such check takes a whole run.
        """
        names = names - self.ambiguous
        if not self._is_compared:
            return names
        self._chances.update(names)
        return {name for name in names if self._chances[name] > _CHANCES}

    def unmergeable(self) -> list[str]:
        """Return the new names and paths that no rule merges; each is returned once."""
        new = [name for name in self.tables.unmergeable if name not in self._said]
        self._said.update(new)
        return sorted(new)

    @property
    def logged(self) -> list[str]:
        """The names that the step logs."""
        return [path for path in self.tables.logs.paths if not _is_size(path)]

    def guesses(self, returned: Sequence[Any], weights: MicroBatchWeights) -> dict[str, Sequence[Any]]:
        """Return the predictions whose merge is not certain, by path.

        Args:
            returned: The output of the step for each micro-batch.
            weights: The weights of the micro-batches.
        """
        table = self.tables.outputs
        return {
            path: values
            for path, values in all_values(table, returned)
            if path not in table.given and not _is_certain(table.all_rules(path), values, weights)
        }

    def refuse_guesses(self, returned: Sequence[Any], weights: MicroBatchWeights) -> None:
        """Raise `SplitError` if `guesses` finds any."""
        table = self.tables.outputs
        for path, values in self.guesses(returned, weights).items():
            fits = table.all_rules(path) if table.knows(path) else None
            raise SplitError(refusal_of_predictions(type(self._module).__name__, path, values, weights.rows, fits=fits))

    def _learn(self, asked: Request, likely: LossRule, trial: EvaluationTrial) -> None:
        """Learn merge rules from one split.

        The loss rule is the first one with the fewest unmergeable logs and outputs. Others with as few are its rivals, unless an
        earlier split refuted them or they weight no log.
        """
        sizes, tolerance = trial.sizes, Tolerance.of(trial.whole.formats).relative
        found: dict[tuple[float, ...], Tables] = {}
        fits: dict[LossRule, tuple[tuple[float, ...], Tables]] = {}
        for rule in self._weights(asked.batch, asked.rows, likely):
            factors = self._shares(rule, trial.batches, sizes)
            if factors is None:
                continue
            if factors not in found:
                found[factors] = Tables.of(self._rules.merge)
                weights = _weights(factors, sizes)
                learn_results(found[factors], trial.whole, trial.runs, weights, tolerance=tolerance)
            fits[rule] = factors, found[factors]
        assert fits, "rows can always be counted"
        self.rule = min(fits, key=lambda rule: len(fits[rule][1].unmergeable))
        fewest = len(fits[self.rule][1].unmergeable)
        self._refuted.update(rule for rule, (_, tables) in fits.items() if len(tables.unmergeable) > fewest)
        others = fits.keys() - self._refuted - {self.rule}
        self._rivals = {rule: paths for rule in others if (paths := _weighted(fits[rule][1]))}
        weights = _weights(fits[self.rule][0], sizes)
        troubles = learn_results(self.tables, trial.whole, trial.runs, weights, tolerance=tolerance)
        if self._group.anywhere(bool(troubles)):
            troubles = without_varying(self.tables, troubles, trial.whole.written, trial.repeated().written)
        if self._group.anywhere(trial.is_drawn and bool(equal_unless_drawn(self.tables))):
            note_drawn(self.tables, trial.whole.written, trial.redrawn().written)
        if troubles:
            raise SplitError(
                refusal_of_state(type(self._module).__name__, troubles, hooks=EVALUATION_HOOKS[self._phase])
            )

    def _shares(self, rule: LossRule, micro_batches: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...] | None:
        """Return the shares of micro-batches by a rule; None if it does not apply to them."""
        try:
            return tuple(shares(rule, micro_batches, sizes))
        except Exception as error:  # the user's function, declared for training batches, may fail on these
            log.info("%s says nothing of these batches (%s: %s).", rule.name, type(error).__name__, error)
            return None

    def _weights(self, batch: Any, rows: int, likely: LossRule) -> list[LossRule]:
        if self._phase == "predict":
            return [LossRule("rows")]
        own = declared(self._rules)
        found = [rule for rule in (self.rule, own, likely, *candidates(batch, rows)) if rule is not None]
        return [rule for rule in dict.fromkeys(found) if not rule.adds and may_count(rule, batch)]


def _weights(factors: Sequence[float], sizes: Sequence[int]) -> MicroBatchWeights:
    return MicroBatchWeights(sizes, [share * sum(sizes) for share in factors])


def _weighted(tables: Tables) -> set[str]:
    """Return the names of logs that are means by loss terms, and not the same in all micro-batches."""
    rules = {path: tables.logs.all_rules(path) for path in tables.logs.paths}
    return {path for path, fit in rules.items() if "mean" in fit and "equal" not in fit and not _is_size(path)}


def _is_size(path: str) -> bool:
    return path.startswith("batch_size of ")


def _are_close(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(*pair, abs_tol=_ROUNDING) for pair in zip(one, other, strict=True))


def _is_certain(rules: frozenset[str], values: Sequence[Any], weights: MicroBatchWeights) -> bool:
    """Return whether the merge of `values` is certain.

    It is certain if a concatenation or `equal` fits, and every other fitting rule gives the same result here. For instance, both `equal`
    and `sum` fit a constant 0. The two rules differ only once a value is not 0, and a check of that batch distinguishes them.
    """
    concatenations = [rule for rule in rules if rule.startswith("concatenate")]
    if len(rules) == 1 and concatenations:
        return True
    if not concatenations and "equal" not in rules:
        return False
    try:
        first, *others = [merged(rule, values, weights) for rule in sorted(rules, key=lambda rule: rule != "equal")]
    except SplitError:
        return False
    return all(same(other, first, tolerance=_ROUNDING) for other in others)
