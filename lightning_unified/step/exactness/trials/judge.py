"""One trial: run rows whole and in micro-batches, and compare every result."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.draws.host import equal_host_draws
from lightning_unified.step.exactness.draws.replay import (
    ConstantDraws,
    NoDraws,
    Order,
    RecordDraws,
    ReplayDraws,
    WatchPrecision,
)
from lightning_unified.step.exactness.gradients import Disagreement
from lightning_unified.step.exactness.losses import LossRule, likeliest
from lightning_unified.step.exactness.rows import starts_of
from lightning_unified.step.exactness.tables import Tables, learn_results, refusal_of_state
from lightning_unified.step.exactness.trials.comparison import Comparison, SplitRuns, Trial
from lightning_unified.step.exactness.trials.run import Run, Runner
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.oom import is_out_of_memory
from lightning_unified.step.results.written import differing, drawn_unequally, with_states_of

__all__ = ["Findings", "Judge"]

_DRAWN = "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The findings of one trial.

    Args:
        agreeing: The loss rules under which the gradients agree, in the order of the candidates.
        rejected: The names of the loss rules under which the gradients differ.
        rows: The number of rows that ran.
        difference: The relative difference of the gradients under the first rule.
        noise: A note on random draws; empty if there is none.
    """

    agreeing: Sequence[LossRule]
    rejected: set[str]
    rows: int
    difference: float
    noise: str

    def joined(self, other: "Findings") -> "Findings":
        """Return these findings combined with those of a later trial of the agreeing rules."""
        names = {rule.name for rule in self.agreeing}
        return replace(
            self,
            agreeing=[rule for rule in other.agreeing if rule.name in names] or other.agreeing,
            rejected=self.rejected | other.rejected,
            difference=max(self.difference, other.difference),
            noise=other.noise or self.noise,
        )


class Judge:
    """Compares a whole run with split runs, and learns how their results merge.

    Args:
        runner: Runs the step and undoes it.
        tables: The merge rules, which the judge extends.
        whose: The name of the module's class.
    """

    def __init__(self, runner: Runner, tables: Tables, *, whose: str) -> None:
        self._runner, self._tables, self._whose = runner, tables, whose
        self._quiet_wholes: dict[tuple[int, int], Run] = {}  # by first row and number of rows

    def findings(
        self, kwargs: "OrderedDict[str, Any]", trial: Trial, rules: Sequence[LossRule], *, since: str
    ) -> Findings | str:
        """Return the findings of a trial, or why it is undecided.

        Args:
            kwargs: The arguments of `training_step`, the whole batch first.
            trial: The rows to run, and their split.
            rules: The loss rules that may hold.
            since: A sentence for a refusal: which batches were split before.

        Raises:
            SplitError: If the whole rows and their micro-batches give different results.
            BaseException: An error that the step itself raises on the whole batch, unchanged.
        """
        comparison = self._quiet(kwargs, trial) if trial.is_quiet else None
        if comparison is None or comparison.none_agrees(rules):
            comparison = self._replayed(kwargs, trial, rules)
        precision = WatchPrecision()
        repeat = partial(self._whole, kwargs, trial, RecordDraws(precision), precision)
        if undecided := comparison.says_nothing:
            self._learn(comparison, self._closest(comparison, rules), repeat=repeat, since=since)
            return undecided
        noise = _DRAWN if comparison.is_drawn else ""
        if comparison.none_agrees(rules) and comparison.troubles:
            why = comparison.troubles[0]
            drawn = comparison
            with equal_host_draws(self._runner.module):
                comparison = self._without_noise(kwargs, trial, why=why)
            for run, other in zip(comparison.all_runs, drawn.all_runs, strict=True):
                run.written = with_states_of(run.written, other.written)
            noise = f"{_DRAWN}; gradients were compared without them ({why})"
        off = {rule.name: comparison.off(rule) for rule in rules}
        if comparison.none_agrees(rules):
            raise SplitError(self._refusal(off, trial, troubles=comparison.troubles) + since)
        best = min(one.excess for one in off.values())
        agreeing = [
            rule for rule in rules if off[rule.name].excess <= max(2 * best, 0.05) and off[rule.name].excess <= 1
        ]
        self._learn(comparison, agreeing[0], repeat=repeat, since=since)
        return Findings(
            agreeing=agreeing,
            rejected={name for name, one in off.items() if one.excess > 1},
            rows=trial.rows,
            difference=off[agreeing[0].name].relative,
            noise=noise,
        )

    def _quiet(self, kwargs: "OrderedDict[str, Any]", trial: Trial) -> Comparison | None:
        """Compare without watching operators, with dropout layers in eval mode.

        Return None if the step draws random numbers nevertheless.
        """
        generators = GeneratorWatch(self._runner.device).note
        watch, precision = NoDraws(generators), WatchPrecision()
        whole = self._quiet_wholes.get((trial.start, trial.rows))
        if whole is None:
            whole = self._whole(kwargs, trial, watch, precision)
            if watch.has_drawn or whole.draws_on_host:
                self._runner.draws_in_eval = True
                return None
            self._quiet_wholes[trial.start, trial.rows] = whole
        draws = [NoDraws(generators) for _ in trial.split]
        return Comparison(whole=whole, split=self._parts(kwargs, trial, draws, precision))

    def _replayed(self, kwargs: "OrderedDict[str, Any]", trial: Trial, rules: Sequence[LossRule]) -> Comparison:
        """Compare with replayed draws, first without watching the backward pass.

        The backward pass seldom draws.
        """
        comparison = self._compared(kwargs, trial, order="interleaved", covers_backward=False)
        if comparison.says_nothing or not comparison.is_drawn or not comparison.none_agrees(rules):
            return comparison
        comparison = self._compared(kwargs, trial, order="interleaved", covers_backward=True)
        if not comparison.is_ordered or not comparison.none_agrees(rules):
            return comparison
        other = self._compared(kwargs, trial, order="blocks", covers_backward=True)
        return comparison if other.none_agrees(rules) else other

    def _compared(
        self, kwargs: "OrderedDict[str, Any]", trial: Trial, *, order: Order, covers_backward: bool
    ) -> Comparison:
        """Compare with replayed draws: each micro-batch gets the draws of its rows."""
        precision = WatchPrecision()
        recorded = RecordDraws(precision, covers_backward=covers_backward)
        whole = self._whole(kwargs, trial, recorded, precision)
        replays = [
            ReplayDraws(
                recorded.draws,
                rows=trial.rows,
                start=start,
                stop=start + size,
                order=order,
                precision=precision,
                covers_backward=recorded.covers_backward,
            )
            for start, size in zip(starts_of(trial.split), trial.split, strict=True)
        ]
        split = self._parts(kwargs, trial, replays, precision)
        for replay in replays:
            replay.finish()
        troubles = [trouble for replay in replays for trouble in replay.troubles]
        if any(run.generators != whole.generators for run in split.runs):
            troubles.append("its step draws from Python's or NumPy's generator, more or less often for fewer rows")
        own = drawn_unequally(whole.written, [run.written for run in split.runs])
        troubles += [f"its step draws from {path}, more or less often for fewer rows" for path in own]
        return Comparison(
            whole=whole,
            split=split,
            troubles=troubles,
            is_drawn=recorded.has_drawn or whole.draws_on_host or bool(own),
            is_ordered=any(replay.is_ordered for replay in replays),
        )

    def _without_noise(self, kwargs: "OrderedDict[str, Any]", trial: Trial, *, why: str) -> Comparison:
        """Compare while random operators return constants."""
        precision = WatchPrecision()
        whole = self._whole(kwargs, trial, ConstantDraws(precision), precision)
        draws = [ConstantDraws(precision) for _ in trial.split]
        split = self._parts(kwargs, trial, draws, precision)
        return Comparison(whole=whole, split=split, troubles=[why], is_drawn=True)

    def _parts(
        self, kwargs: "OrderedDict[str, Any]", trial: Trial, draws: Sequence[Any], precision: WatchPrecision
    ) -> SplitRuns:
        """Run every micro-batch under its own draw mode."""
        batches = [trial.part(start, size) for start, size in zip(starts_of(trial.split), trial.split, strict=True)]
        runs = [
            self._part(kwargs, batch, size, trial, mode, precision)
            for batch, size, mode in zip(batches, trial.split, draws, strict=True)
        ]
        return SplitRuns(sizes=trial.split, batches=batches, runs=runs)

    def _whole(self, kwargs: "OrderedDict[str, Any]", trial: Trial, draws: Any, precision: WatchPrecision) -> Run:
        try:
            return self._runner.run(kwargs, trial.whole(), rows=trial.rows, draws=draws, precision=precision)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if self._runner.leaves_out_autocast:  # the module may need autocast
                self._runner.keeps_autocast = True
                return self._whole(kwargs, trial, draws, precision)
            if trial.is_whole:
                raise
            own = self._runner.failure(kwargs)
            if own is not None and type(own) is type(error):  # the whole batch fails too: raise the user's error
                raise own from None
            raise SplitError(self._does_not_run(error, trial.rows)) from error

    def _part(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        rows: int,
        trial: Trial,
        draws: Any,
        precision: WatchPrecision,
    ) -> Run:
        try:
            return self._runner.run(kwargs, batch, rows=rows, draws=draws, precision=precision)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise SplitError(self._does_not_run(error, rows, of=trial.rows)) from error

    def _closest(self, comparison: Comparison, rules: Sequence[LossRule]) -> LossRule:
        """Return the loss rule under which the most logs and outputs merge.

        It serves checks whose gradients cannot decide.
        """
        tolerance = comparison.tolerance.relative

        def lacking(rule: LossRule) -> int:
            tables, split = Tables(), comparison.split
            learn_results(tables, comparison.whole, split.runs, split.parts(rule), tolerance=tolerance)
            return len(tables.outputs.unmergeable) + len(tables.logs.unmergeable)

        return min(filter(comparison.can_count, [likeliest(rules), *rules]), key=lacking)

    def _learn(self, comparison: Comparison, rule: LossRule, *, repeat: Callable[[], Run], since: str) -> None:
        """Learn how results merge; refuse written state that no rule merges.

        State that also differs between two equal runs is not refused.
        """
        tolerance, whole, split = comparison.tolerance.relative, comparison.whole, comparison.split
        parts = split.parts(rule)
        troubles = learn_results(self._tables, whole, split.runs, parts, tolerance=tolerance)
        if whole.loss is not None:
            losses = [run.loss for run in split.runs]
            self._tables.outputs.learn("loss", losses, whole.loss, parts, tolerance=tolerance)
        if troubles:
            again = differing(whole.written, repeat().written)
            troubles = [path for path in troubles if path not in again]
        if troubles:
            raise SplitError(refusal_of_state(self._whose, troubles) + since)

    def _refusal(self, off: dict[str, Disagreement], trial: Trial, *, troubles: Sequence[str]) -> str:
        tried = "; ".join(f"{name}: {one.relative:.1e}" for name, one in off.items())
        closest = min(off.values(), key=lambda one: one.excess)
        drawn = (
            f" Its random draws could not be replayed ({troubles[0]}), and without them it differs too; draw in prepare or "
            "on_after_batch_transfer, which run once a batch."
            if troubles
            else ""
        )
        return (
            f"{self._whose} cannot be split exactly: the gradient of {trial.rows} rows differs from that of their micro-batches "
            f"({tried}, relative, at {self._runner.name_of(closest.parameter)}).{drawn} The ways out, in MicroBatchRules from "
            "configure_micro_batches: loss_weight, the number of terms its loss is a mean over; loss_is_sum=True with totals from prepare; "
            "unit=n for a loss over groups of n rows; encoders=(…) if the loss compares rows (contrastive) and these submodules treat "
            "each row by itself; splittable=False to run batches whole; check=False to split all the same."
        )

    def _does_not_run(self, error: BaseException, rows: int, *, of: int | None = None) -> str:
        text = (str(error).splitlines() or [""])[0]
        among = "" if of is None else f" of {of}"
        return (
            f"{self._whose}.training_step fails on {rows}{among} rows of its batch ({type(error).__name__}: {text}), so the batch cannot be "
            "split. In MicroBatchRules: unit=n if n rows belong together, splittable=False to run batches whole, or check=False if it is "
            "sound on the micro-batches used."
        )
