"""One trial: run rows whole and in micro-batches, and compare every result."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from lightning_unified.errors import RankError, SplitError, UndoError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.gradients import unequal_existence
from lightning_unified.step.exactness.losses import LossRule, likeliest
from lightning_unified.step.exactness.tables import Tables, owner_of
from lightning_unified.step.exactness.trials.comparison import Comparison, Trial
from lightning_unified.step.exactness.trials.learning import (
    differing,
    entries_by_rows,
    equal_unless_drawn,
    learn_results,
    note_drawn,
    without_varying,
)
from lightning_unified.step.exactness.trials.proportion import is_proportional
from lightning_unified.step.exactness.trials.refusals import (
    refusal_of_existence,
    refusal_of_gradients,
    refusal_of_moves,
    refusal_of_proportion,
    refusal_of_state,
)
from lightning_unified.step.exactness.trials.rounding import MARGIN, MOST, nudged
from lightning_unified.step.exactness.trials.run import Run, Runner
from lightning_unified.step.exactness.trials.trial_runs import TrialRuns
from lightning_unified.step.results.state.queues import has_queue
from lightning_unified.step.results.state.rings import Probe, learn_probes, probes_of

__all__ = ["Judge"]

_DRAWN = "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"


class Judge:
    """Compares whole runs with split runs, and learns into `tables` how their results merge."""

    def __init__(self, runner: Runner, tables: Tables) -> None:
        self._runner, self._tables = runner, tables
        self._whose = type(runner.module).__name__
        self._quiet_wholes: dict[tuple[int, int], Run] = {}
        self._proportional: bool | None = None

    def findings(self, trial: Trial, rules: Sequence[LossRule], *, since: str) -> Findings | str:
        """Return the findings of a trial, or why it is undecided.

        Args:
            trial: The rows to run, and their split.
            rules: The loss rules that may hold.
            since: A sentence for a refusal: which batches were split before.

        Raises:
            SplitError: If the whole rows and their micro-batches give different results.
            BaseException: An error that the step itself raises on the whole batch, unchanged.
        """
        runs = TrialRuns(self._runner, trial, quiet_wholes=self._quiet_wholes)
        tried = rules
        comparison, noise, rules = self._compared(runs, rules, trial.of_summands, is_quiet=trial.is_quiet)
        if undecided := comparison.says_nothing:
            self._require_unmoved(comparison)
            self._learn(comparison, _closest(comparison, rules), runs, since=since)
            return undecided
        rules = _without_guesses(comparison, rules)
        off = {rule.name: comparison.off(rule) for rule in rules}
        refuted = {rule.name for rule in tried if rule.name not in off and not rule.is_guess}
        best = min(off.values(), key=lambda one: one.excess)
        allowed, by_rounding = _allowed(best.excess, comparison, runs, is_late=bool(since))
        if allowed < best.excess and (
            best.excess <= by_rounding or (since and self._agrees_nudged(trial, rules, comparison))
        ):
            self._require_unmoved(comparison)
            self._learn(comparison, _closest(comparison, rules), runs, since=since, slack=by_rounding)
            return "rounding decides whether its micro-batches agree, on the rows looked at"
        if best.excess > allowed:
            self._require_unmoved(comparison, by_rows=False)
            differences = {name: one.relative for name, one in off.items()}
            not_replayed = comparison.troubles[0] if comparison.troubles else ""
            parameter = self._runner.name_of(best.parameter)
            refusal = refusal_of_gradients(
                self._whose,
                trial.rows,
                differences,
                parameter=parameter,
                not_replayed=not_replayed,
                not_finite=comparison.split.not_finite,
                is_skipped=comparison.whole.loss is None,
                initialized=comparison.initialized,
                summands=comparison.names_of_summands if len(comparison.names_of_summands) > 1 else (),
            )
            is_near = comparison.lowest is torch.float32 and best.excess <= MOST[torch.float32]
            raise SplitError(refusal + since, is_for_rules=True, may_be_rounding=is_near)
        self._require_unmoved(comparison)
        alone = unequal_existence(comparison.whole.gradient, [run.gradient for run in comparison.split.runs])
        if alone is not None:
            is_of_whole = comparison.whole.gradient.exist[alone]
            parameter = self._runner.name_of(alone)
            raise SplitError(refusal_of_existence(self._whose, trial.rows, parameter, is_of_whole=is_of_whole) + since)
        agreeing = [rule for rule in rules if off[rule.name].excess <= min(max(2 * best.excess, 0.05), allowed)]
        self._learn(comparison, agreeing[0], runs, since=since, slack=allowed)
        return Findings(
            agreeing=agreeing,
            rejected=refuted | {name for name, one in off.items() if one.excess > allowed},
            rows=trial.rows,
            difference=off[agreeing[0].name].relative,
            noise=noise,
            first=trial.start,
            is_thin=_is_thin(comparison, agreeing[0]),
            is_proportional=self._is_proportional(comparison, agreeing[0]),
        )

    def _require_unmoved(self, comparison: Comparison, *, by_rows: bool = True) -> None:
        """Raise `SplitError` if the step moves a trained parameter whenever it runs.

        Args:
            comparison: The runs.
            by_rows: Whether to raise, too, if it moves only for other rows than before, as a layer does that initializes itself.
        """
        moved = comparison.moved_again
        if not by_rows and self._runner.anywhere(moved is not None):
            comparison.repeated()
            moved = moved if moved in comparison.repeated().moved else None
        if moved is not None:
            raise refusal_of_moves(self._whose, moved)

    def _is_proportional(self, comparison: Comparison, rule: LossRule) -> bool:
        """Return whether backward passes are proportional to the loss, by the first trial of a check.

        Raises:
            SplitError: If they are not, and parameters are not whole, or summands of the loss have weights of their own: then nothing
                can weight their gradients afterwards.
        """
        if self._proportional is None:
            found = is_proportional(comparison, anywhere=self._runner.anywhere)
            self._proportional = not self._runner.anywhere(not found)
            if not (self._proportional or self._runner.has_whole_parameters):
                raise refusal_of_proportion(self._whose)
        if rule.summands and not self._proportional:
            raise refusal_of_proportion(self._whose, of_summands=True)
        return self._proportional

    def _compared(
        self, runs: TrialRuns, rules: Sequence[LossRule], of_summands: Sequence[LossRule], *, is_quiet: bool
    ) -> tuple[Comparison, str, Sequence[LossRule]]:
        """Compare without draws, with replayed or constant ones; return a note on them and the rules left too.

        Where no rule agrees, but one with a weight for each summand of the loss does, that one is left.
        """
        comparison = runs.quiet() if is_quiet else None
        if comparison is not None and (found := _agreeing(comparison, rules, of_summands)):
            return comparison, _DRAWN if comparison.is_drawn else "", found
        if comparison is None or comparison.none_agrees(rules):
            comparison = runs.replayed(rules)
        noise = _DRAWN if comparison.is_drawn else ""
        if comparison.says_nothing:
            return comparison, noise, rules
        if found := _agreeing(comparison, rules, of_summands):
            return comparison, noise, found
        if not self._runner.anywhere(bool(comparison.troubles)):
            return comparison, noise, rules
        comparison = runs.without_noise(comparison, rules)
        why = comparison.troubles[0] if comparison.troubles else "another rank could not replay them"
        noise = f"{_DRAWN}; gradients were compared without them ({why})"
        return comparison, noise, _agreeing(comparison, rules, of_summands) or rules

    def _agrees_nudged(self, trial: Trial, rules: Sequence[LossRule], comparison: Comparison) -> bool:
        """Return whether micro-batches agree after all with weights that are moved by one rounding step.

        Where rounding chooses the largest of two values, as a pooling layer does, one row moves a gradient by more than the tolerance. Other
        weights choose elsewhere.
        """
        if comparison.lowest is None:
            return False
        with nudged(self._runner.module.parameters(), comparison.lowest) as has_changed:
            if not self._runner.anywhere(has_changed):
                return False
            runs = TrialRuns(self._runner, trial, quiet_wholes={})
            again, _, _ = self._compared(runs, rules, (), is_quiet=trial.is_quiet)
        return not (again.says_nothing or again.none_agrees(rules))

    def _learn(
        self, comparison: Comparison, rule: LossRule, runs: TrialRuns, *, since: str, slack: float = 1.0
    ) -> None:
        """Learn how results merge; refuse written state that no rule merges.

        State that also differs between two equal runs is not refused, nor is a cache by number of rows. Where rounding explains a difference of
        `slack` tolerances of gradients, it explains as much of results.
        """
        tolerance, whole, split = slack * comparison.tolerance.relative, comparison.whole, comparison.split
        weights = comparison.weights(rule)
        if rule.summands:
            self._tables.weigh_by_summand()
        troubles = learn_results(self._tables, whole, split.runs, weights, tolerance=tolerance)
        if whole.loss is not None and not rule.summands:  # else the summands' values were compared
            losses = [run.loss for run in split.runs]
            self._tables.outputs.learn("loss", losses, whole.loss, weights, tolerance=tolerance)
        troubles += self._rings_that_differ(comparison)
        if self._runner.anywhere(bool(troubles)):
            caches = self._caches(troubles, comparison, runs)
            troubles = [path for path in troubles if path not in caches]
        if self._runner.anywhere(bool(troubles)):
            again = comparison.repeated().written
            troubles = without_varying(self._tables, troubles, whole.written, again)
        if troubles:
            raise SplitError(refusal_of_state(self._whose, troubles) + since)
        if self._runner.anywhere(comparison.is_drawn and bool(equal_unless_drawn(self._tables))):
            note_drawn(self._tables, whole.written, runs.redrawn().written)

    def _rings_that_differ(self, comparison: Comparison) -> list[str]:
        """Run the rows near the end of each ring that the step writes; return what no rule merges there."""
        table, whole, rows = self._tables.written, comparison.whole, sum(comparison.split.sizes)
        probes, runs = probes_of(table, whole.written, rows), []
        # copies, because each run notes the state before it in the same tensors
        places = {one.path: deepcopy(whole.written[one.path].before) for one in probes}
        while self._runner.anywhere(bool(probes)):
            probe = probes.pop() if probes else None
            run = self._probed(comparison, probe, None if probe is None else places[probe.path])
            if probe is not None:
                logs_alike = run is not None and run.logs.keys() == whole.logs.keys()
                runs.append((probe, run if run is None else run.written if logs_alike else {}))
        return [path for path in learn_probes(table, runs, whole.written, rows) if runs and not has_queue(table, path)]

    def _probed(self, comparison: Comparison, probe: Probe | None, before: Any) -> Run | None:
        """Run the whole rows from a place in a ring; return None if the step fails there.

        `before` is the place where it is.
        """
        put = None if probe is None else comparison.whole.written[probe.path].put
        if probe is None or put is None:
            return comparison.repeated()
        put(probe.like(before))
        try:
            return comparison.repeated()
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (UndoError, RankError)):
                raise
            return None
        finally:
            put(before)

    def _caches(self, troubles: Sequence[str], comparison: Comparison, runs: TrialRuns) -> set[str]:
        """Return entries by number of rows that are the same for any rows of that number.

        A micro-batch then makes the entry that it needs, as the whole batch does. Other rows of a micro-batch's number must give the same.
        """
        split = comparison.split
        found = entries_by_rows(comparison.all_runs, [sum(split.sizes), *split.sizes]).intersection(troubles)
        makers = [index for index, run in enumerate(split.runs) if found & run.written.keys()]
        if not self._runner.anywhere(bool(makers)):  # the cache has the entries of micro-batches
            return {path for path in found if owner_of(path) in self._tables.sized}
        index = makers[0] if makers else 0
        varying = {owner_of(path) for path in differing(split.runs[index].written, runs.elsewhere(index).written)}
        found = {path for path in found if makers and owner_of(path) not in varying}
        self._tables.note_sized(found)
        return found


def _allowed(excess: float, comparison: Comparison, runs: TrialRuns, *, is_late: bool) -> tuple[float, float]:
    """Return how many tolerances a difference may have, and how many rounding explains.

    Args:
        excess: The difference, in tolerances.
        comparison: The runs that differ.
        runs: Measures the rounding.
        is_late: Whether earlier batches agreed: then rounding may explain any difference in float32, and the check decides nothing.
    """
    lowest = comparison.lowest
    if excess <= 1 or lowest is None or (excess > MOST[lowest] and not (is_late and lowest is torch.float32)):
        return 1.0, 1.0
    explained = max(1.0, MARGIN[lowest] * runs.rounding(lowest))
    return min(explained, MOST[lowest]), explained if lowest is torch.float32 else 1.0


def _agreeing(comparison: Comparison, rules: Sequence[LossRule], of_summands: Sequence[LossRule]) -> Sequence[LossRule]:
    """Return the rules if one of them agrees; else one with a weight for each summand of the loss.

    The latter keeps of its known weights those that agree here too.
    """
    known = next((rule for rule in rules if rule.summands), None)
    if known is None and not comparison.none_agrees(rules):
        return rules
    is_sum = known is not None or (not comparison.says_nothing and bool(comparison.names_of_summands))
    fitting = comparison.rules_of_summands(of_summands, known) if of_summands and is_sum else ()
    found = next((one for one in fitting if comparison.off(one).excess <= 1), None)
    return [] if found is None else [found]


def _is_thin(comparison: Comparison, rule: LossRule) -> bool:
    """Return whether few micro-batches had gradients, so that several rules may agree by chance."""
    if any(not one.is_told and one.is_open for one in rule.summands):
        return True
    return sum(not run.gradient.is_zero for run in comparison.split.runs) < 2


def _without_guesses(comparison: Comparison, rules: Sequence[LossRule]) -> Sequence[LossRule]:
    """Return the loss rules without guesses, but for those that agree where no other rule does.

    In 16 bits, weights that are off by rounding would agree by chance. So would weights of 0 where the whole gradient is zero. Where nothing
    else is left, guesses stay, to be refused by name.
    """
    others = [rule for rule in rules if not rule.is_guess]
    is_by_chance = comparison.whole.gradient.is_zero or comparison.lowest in (torch.float16, torch.bfloat16)
    if is_by_chance or not comparison.none_agrees(others):
        return others or rules
    return [*others, *(rule for rule in rules if rule.is_guess and comparison.off(rule).excess <= 1)] or rules


def _closest(comparison: Comparison, rules: Sequence[LossRule]) -> LossRule:
    """Return the loss rule under which the most logs and outputs merge.

    It serves checks whose gradients cannot decide.
    """
    split, tolerance = comparison.split, comparison.tolerance.relative

    def lacking(rule: LossRule) -> int:
        tables = Tables()
        learn_results(tables, comparison.whole, split.runs, split.weights(rule), tolerance=tolerance)
        return len(tables.unmergeable)

    named = [rule for rule in rules if not rule.is_guess] or rules
    return min(filter(comparison.can_count, [likeliest(named), *named]), key=lacking)
