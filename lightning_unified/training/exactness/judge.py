"""The judgement on one trial: some rows run whole, the same rows in parts, and every result of both compared."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.training.exactness.draws import (
    ConstantDraws,
    NoDraws,
    Order,
    RecordDraws,
    ReplayDraws,
    WatchPrecision,
)
from lightning_unified.training.exactness.gradients import Disagreement, Tolerance, disagreement
from lightning_unified.training.exactness.host_draws import equal_host_draws
from lightning_unified.training.exactness.losses import LossRule, likeliest, require_counts, shares
from lightning_unified.training.exactness.merging import Parts
from lightning_unified.training.exactness.results import Tables, learn_results, refusal_of_state
from lightning_unified.training.exactness.rows import starts_of
from lightning_unified.training.exactness.run import Run, Runner
from lightning_unified.training.exactness.written import differing
from lightning_unified.training.generators import GeneratorWatch
from lightning_unified.training.oom import is_out_of_memory

__all__ = ["Findings", "Judge", "Trial"]

_DRAWN = "random draws, such as dropout's, are made for each micro-batch, not for the whole batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is run.

    Args:
        batch: The loader's.
        batch_rows: Its rows.
        start: The first row that runs.
        rows: How many run.
        take: `take(batch, start, stop, rows=batch_rows)` returns some of the batch's rows.
        splits: The rows of each part, for each way to split.
        is_quiet: Whether to run without dropout first, which takes half the time, and with it only if that cannot tell.
    """

    batch: Any
    batch_rows: int
    start: int
    rows: int
    take: Callable[..., Any]
    splits: Sequence[Sequence[int]]
    is_quiet: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all rows of the batch run."""
        return self.rows == self.batch_rows

    def part(self, start: int, size: int) -> Any:
        """Return `size` of the rows that run, from `start` of them on."""
        first = self.start + start
        return self.take(self.batch, first, first + size, rows=self.batch_rows)

    def whole(self) -> Any:
        """Return all rows that run."""
        return self.part(0, self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a trial showed.

    Args:
        agreeing: The loss rules under which gradients agree, the closest first.
        rejected: The names of those under which they do not.
        rows: That ran.
        difference: Of the gradients under the first rule, relative.
        noise: What is to be said of random draws; empty if nothing.
    """

    agreeing: Sequence[LossRule]
    rejected: set[str]
    rows: int
    difference: float
    noise: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """One way to split the rows, and its runs."""

    sizes: Sequence[int]
    batches: Sequence[Any]
    runs: Sequence[Run]

    def parts(self, rule: LossRule) -> Parts:
        """Return what the parts weigh under a rule."""
        terms = list(map(float, self.sizes)) if rule.adds else [one * sum(self.sizes) for one in self.shares(rule)]
        return Parts(self.sizes, terms)

    def shares(self, rule: LossRule) -> list[float]:
        """Return by what each part's loss is multiplied."""
        if rule.count is not None:
            require_counts(rule, [float(rule.count(batch)) for batch in self.batches])
        return shares(rule, self.batches, self.sizes)


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The whole run, the split ones, and what made their random draws incomparable."""

    whole: Run
    splits: Sequence[_Split]
    troubles: Sequence[str]
    is_drawn: bool
    is_ordered: bool
    known: dict[str, Disagreement] = field(default_factory=dict)

    @property
    def tolerance(self) -> Tolerance:
        """What counts as rounding in the formats that were computed in."""
        formats = set(self.whole.formats)
        for split in self.splits:
            formats |= {one for run in split.runs for one in run.formats}
        return Tolerance.of(formats)

    def can_count(self, rule: LossRule) -> bool:
        """Return whether an inferred rule counts 0 or more terms in every part; a declared one that does not is an error."""
        if rule.count is None or rule.name == "loss_weight":
            return True
        return all(float(rule.count(batch)) >= 0 for split in self.splits for batch in split.batches)

    def off(self, rule: LossRule) -> Disagreement:
        """Return where the parts' gradients, weighted by `rule`, differ most from the whole's."""
        if rule.name not in self.known:
            self.known[rule.name] = self._worst(rule)
        return self.known[rule.name]

    def _worst(self, rule: LossRule) -> Disagreement:
        if not self.can_count(rule):
            return Disagreement(math.inf, math.inf, 0)
        worst = [self._off(split, rule) for split in self.splits]
        return max(worst, key=lambda one: one.excess)

    def _off(self, split: _Split, rule: LossRule) -> Disagreement:
        pairs = zip(split.runs, split.shares(rule), strict=True)
        terms = [run.gradient.values * share for run, share in pairs if share]
        return disagreement(self.whole.gradient, terms, self.tolerance)


class Judge:
    """Compares a whole run with split ones, and learns how their results are put together.

    Args:
        runner: Runs the step aside.
        tables: Where rules for results are kept.
        whose: The module's name.
    """

    def __init__(self, runner: Runner, tables: Tables, *, whose: str) -> None:
        self._runner, self._tables, self._whose = runner, tables, whose

    def findings(
        self, kwargs: "OrderedDict[str, Any]", trial: Trial, rules: Sequence[LossRule], *, since: str
    ) -> Findings | str:
        """Return what the trial shows, or why nothing can be told.

        Args:
            kwargs: Of `training_step`, the undivided batch first.
            trial: What to run.
            rules: The loss rules that may hold.
            since: What to say of batches that were split before, in a refusal.

        Raises:
            SplitError: If the rows' results are not those of their parts.
            BaseException: Whatever the step itself raises on whole rows, untouched.
        """
        comparison = self._quiet(kwargs, trial) if trial.is_quiet else None
        if comparison is None or _none_agrees({rule.name: comparison.off(rule) for rule in rules}):
            comparison = self._compared(kwargs, trial, order="interleaved")
        precision = WatchPrecision()
        repeat = partial(self._whole, kwargs, trial, RecordDraws(precision), precision)
        if undecided := comparison.whole.gradient.says_nothing:
            self._learn(comparison, self._closest(comparison, rules), repeat=repeat, since=since)
            return undecided
        off = {rule.name: comparison.off(rule) for rule in rules}
        noise = _DRAWN if comparison.is_drawn else ""
        if _none_agrees(off) and comparison.is_ordered:
            other = self._compared(kwargs, trial, order="blocks")
            found = {rule.name: other.off(rule) for rule in rules}
            if not _none_agrees(found):
                comparison, off = other, found
        if _none_agrees(off) and comparison.troubles:
            why = comparison.troubles[0]
            with equal_host_draws():
                comparison = self._without_noise(kwargs, trial, why=why)
            off = {rule.name: comparison.off(rule) for rule in rules}
            noise = f"{_DRAWN}; gradients were compared without them ({why})"
        if _none_agrees(off):
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

    def _quiet(self, kwargs: "OrderedDict[str, Any]", trial: Trial) -> _Comparison | None:
        """Return the comparison without watching operators, dropout layers in eval mode; None if the step draws all the same."""
        generators = GeneratorWatch(self._runner.device).note
        watch, precision, splits = NoDraws(generators), WatchPrecision(), []
        whole = self._whole(kwargs, trial, watch, precision)
        if watch.has_drawn or whole.draws_on_host:
            self._runner.draws_in_eval = True
            return None
        for sizes in trial.splits:
            batches = [trial.part(start, size) for start, size in zip(starts_of(sizes), sizes, strict=True)]
            runs = [
                self._part(kwargs, batch, size, trial, NoDraws(generators), precision)
                for batch, size in zip(batches, sizes, strict=True)
            ]
            splits.append(_Split(sizes=sizes, batches=batches, runs=runs))
        return _Comparison(whole=whole, splits=splits, troubles=[], is_drawn=False, is_ordered=False)

    def _compared(self, kwargs: "OrderedDict[str, Any]", trial: Trial, *, order: Order) -> _Comparison:
        precision = WatchPrecision()
        recorded = RecordDraws(precision)
        whole = self._whole(kwargs, trial, recorded, precision)
        splits, replays, troubles = [], [], []
        for sizes in trial.splits:
            batches, runs = [], []
            for start, size in zip(starts_of(sizes), sizes, strict=True):
                replay = ReplayDraws(
                    recorded.draws, rows=trial.rows, start=start, stop=start + size, order=order, precision=precision
                )
                batches.append(trial.part(start, size))
                runs.append(self._part(kwargs, batches[-1], size, trial, replay, precision))
                replay.finish()
                replays.append(replay)
                if runs[-1].generators != whole.generators:
                    troubles.append(
                        "its step draws from Python's or NumPy's generator, more or less often for fewer rows"
                    )
            splits.append(_Split(sizes=sizes, batches=batches, runs=runs))
        return _Comparison(
            whole=whole,
            splits=splits,
            troubles=[*(trouble for replay in replays for trouble in replay.troubles), *troubles],
            is_drawn=recorded.has_drawn or whole.draws_on_host,
            is_ordered=any(replay.is_ordered for replay in replays),
        )

    def _without_noise(self, kwargs: "OrderedDict[str, Any]", trial: Trial, *, why: str) -> _Comparison:
        precision, splits = WatchPrecision(), []
        whole = self._whole(kwargs, trial, ConstantDraws(precision), precision)
        for sizes in trial.splits:
            batches = [trial.part(start, size) for start, size in zip(starts_of(sizes), sizes, strict=True)]
            runs = [
                self._part(kwargs, batch, size, trial, ConstantDraws(precision), precision)
                for batch, size in zip(batches, sizes, strict=True)
            ]
            splits.append(_Split(sizes=sizes, batches=batches, runs=runs))
        return _Comparison(whole=whole, splits=splits, troubles=[why], is_drawn=True, is_ordered=False)

    def _whole(self, kwargs: "OrderedDict[str, Any]", trial: Trial, draws: Any, precision: WatchPrecision) -> Run:
        try:
            return self._runner.run(kwargs, trial.whole(), rows=trial.rows, draws=draws, precision=precision)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if self._runner.leaves_out_autocast:  # a module may need it
                self._runner.keeps_autocast = True
                return self._whole(kwargs, trial, draws, precision)
            if trial.is_whole:
                raise
            own = self._runner.failure(kwargs)
            if own is not None and type(own) is type(error):  # it fails on the whole batch too: not ours to refuse
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

    def _closest(self, comparison: _Comparison, rules: Sequence[LossRule]) -> LossRule:
        """Return the rule under which most of what is logged and returned can be put together, where gradients say nothing."""
        tolerance = comparison.tolerance.relative

        def lacking(rule: LossRule) -> int:
            tables = Tables()
            for split in comparison.splits:
                learn_results(tables, comparison.whole, split.runs, split.parts(rule), tolerance=tolerance)
            return len(tables.outputs.unmergeable) + len(tables.logs.unmergeable)

        return min(filter(comparison.can_count, [likeliest(rules), *rules]), key=lacking)

    def _learn(self, comparison: _Comparison, rule: LossRule, *, repeat: Callable[[], Run], since: str) -> None:
        """Learn how results are put together; refuse state that nothing puts together, unless an equal run writes it differently."""
        tolerance, again = comparison.tolerance.relative, None
        for split in comparison.splits:
            parts = split.parts(rule)
            troubles = learn_results(self._tables, comparison.whole, split.runs, parts, tolerance=tolerance)
            losses = [run.loss for run in split.runs]
            if comparison.whole.loss is not None:
                self._tables.outputs.learn("loss", losses, comparison.whole.loss, parts, tolerance=tolerance)
            if troubles and again is None:
                again = differing(comparison.whole.written, repeat().written)
            troubles = [path for path in troubles if again is None or path not in again]
            if troubles:
                raise SplitError(refusal_of_state(self._whose, troubles) + since)

    def _refusal(self, off: dict[str, Disagreement], trial: Trial, *, troubles: Sequence[str]) -> str:
        tried = "; ".join(f"{name}: {one.relative:.1e}" for name, one in off.items())
        closest = min(off.values(), key=lambda one: one.excess)
        drawn = (
            f" Its random draws could not be replayed ({troubles[0]}), and without them it differs too."
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


def _none_agrees(off: dict[str, Disagreement]) -> bool:
    return all(one.excess > 1 for one in off.values())
