"""The runs of one trial, with random draws replayed or left out."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_unified.errors import RankError, SplitError, UndoError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.exactness.draws.constant import ConstantDraws
from lightning_unified.step.exactness.draws.host import equal_host_draws
from lightning_unified.step.exactness.draws.replay import DrawMode, NoDraws, Order, RecordDraws, ReplayDraws
from lightning_unified.step.exactness.facts.fields import named_tensors
from lightning_unified.step.exactness.gradients import disagreement
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.exactness.rows import starts_of
from lightning_unified.step.exactness.trials.comparison import Comparison, SplitRuns, Trial
from lightning_unified.step.exactness.trials.refusals import failure_on_rows, unsplit
from lightning_unified.step.exactness.trials.rounding import nudged
from lightning_unified.step.exactness.trials.run import Run, Runner
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.results.state.writes import drawn_unequally, with_states_of

__all__ = ["TrialRuns"]

_SELDOM = 0.02  # judgement: below the probability of most augmentations
_OTHER = 0.25  # other draws than those of comparisons without noise


class TrialRuns:
    """Runs the rows of a trial whole and in micro-batches, with a choice of random draws.

    Args:
        runner: Runs the step and undoes it.
        trial: The rows to run, and their split.
        quiet_wholes: Whole runs without dropout, by first row and number of rows. The trials of one check share them.
    """

    def __init__(self, runner: Runner, trial: Trial, *, quiet_wholes: dict[tuple[int, int], Run]) -> None:
        self._runner, self._trial, self._quiet_wholes = runner, trial, quiet_wholes

    def quiet(self) -> Comparison | None:
        """Compare without watching operators, with dropout layers in eval mode.

        Return None if the step draws random numbers nevertheless.
        """
        generators = GeneratorWatch(self._runner.device).note
        rows = (self._trial.start, self._trial.rows)
        whole = self._quiet_wholes.get(rows)
        if whole is None:
            watch = NoDraws(generators)
            whole = self._whole(watch)
            if self._runner.anywhere(watch.has_drawn or whole.draws_on_host):
                self._runner.draws_in_eval = True
                return None
            self._quiet_wholes[rows] = whole
        split = self._split_runs(lambda _: NoDraws(generators))
        repeated, is_drawn = (
            lambda only=None: self._whole(NoDraws(generators), only=only),
            self._runner.draws_in_backward,
        )
        return Comparison(
            whole=whole, split=split, repeated=repeated, is_drawn=is_drawn, reads_summands=self._reads_summands
        )

    def replayed(self, rules: Sequence[LossRule]) -> Comparison:
        """Compare with replayed draws, first without watching the backward pass.

        The backward pass seldom draws.
        """
        comparison = self._compared(order="interleaved", covers_backward=False)
        if comparison.says_nothing or not comparison.none_agrees(rules):
            return comparison
        if not self._runner.anywhere(comparison.is_drawn):
            return comparison
        comparison = self._compared(order="interleaved", covers_backward=True)
        if not comparison.none_agrees(rules) or not self._runner.anywhere(comparison.is_ordered):
            return comparison
        other = self._compared(order="blocks", covers_backward=True)
        return comparison if other.none_agrees(rules) else other

    def without_noise(self, drawn: Comparison, rules: Sequence[LossRule]) -> Comparison:
        """Compare while random operators return constants.

        If some rule agrees, compare once more with constants for which a step does what it does seldom.

        Args:
            drawn: A comparison of the same rows with random draws, of which some could not be replayed.
            rules: The loss rules that may hold.
        """
        often = self._constant(drawn, share=0.5)
        if often.none_agrees(rules):
            return often
        seldom = self._constant(drawn, share=_SELDOM)
        return seldom if seldom.none_agrees(rules) else often

    def _constant(self, drawn: Comparison, *, share: float) -> Comparison:
        repeated = partial(self._constant_whole, share)
        whole = repeated()
        split = self._split_runs(lambda _: ConstantDraws(share), within=partial(equal_host_draws, self._runner.module))
        comparison = Comparison(
            whole=whole,
            split=split,
            repeated=repeated,
            troubles=drawn.troubles[:1],
            is_drawn=True,
            reads_summands=self._reads_summands,
        )
        for run, other in zip(comparison.all_runs, drawn.all_runs, strict=True):
            run.written = with_states_of(run.written, other.written)
        return comparison

    def _constant_whole(self, share: float, only: str | None = None) -> Run:
        with equal_host_draws(self._runner.module):
            return self._whole(ConstantDraws(share), only=only)

    def redrawn(self) -> Run:
        """Run the whole rows with other random draws."""
        return self._constant_whole(_OTHER)

    def rounding(self, lowest: torch.dtype) -> float:
        """Return the change of the gradient by one rounding step of the parameters, in tolerances.

        Args:
            lowest: The 16-bit format of the runs.
        """
        with equal_host_draws(self._runner.module):
            whole = self._whole(ConstantDraws())
            with nudged(self._runner.module.parameters(), lowest) as has_changed:
                moved = self._whole(ConstantDraws()) if has_changed else whole
        comparison = Comparison(whole=whole, split=SplitRuns(sizes=[], batches=[], runs=[]), repeated=lambda: whole)
        excess = disagreement(whole.gradient, [(moved.gradient, 1.0)], comparison.tolerance).excess
        return excess if math.isfinite(excess) else 0.0

    def elsewhere(self, index: int) -> Run:
        """Run as many rows as micro-batch `index` has, at the other end of the trial."""
        trial, size = self._trial, self._trial.split[index]
        start = 0 if index == len(trial.split) - 1 else trial.rows - size
        return self._micro_batch(trial.rows_from(start, size), size, RecordDraws())

    def _compared(self, *, order: Order, covers_backward: bool) -> Comparison:
        """Compare with replayed draws: each micro-batch gets the draws of its rows."""
        recorded = RecordDraws(covers_backward=covers_backward)
        whole = self._whole(recorded)
        sizes, replays = self._trial.split, list[ReplayDraws]()

        def replay(index: int) -> ReplayDraws:
            start = starts_of(sizes)[index]
            place = {"rows": self._trial.rows, "start": start, "stop": start + sizes[index]}
            replays.append(ReplayDraws(recorded.draws, **place, order=order, covers_backward=covers_backward))
            return replays[-1]

        split = self._split_runs(replay)
        for one in replays:
            one.finish()
        troubles = [trouble for one in replays for trouble in one.troubles]
        if any(run.generators != whole.generators for run in split.runs):
            troubles.append("its step draws from Python's or NumPy's generator, more or less often for fewer rows")
        own = drawn_unequally(whole.written, [run.written for run in split.runs])
        troubles += [f"its step draws from {path}, more or less often for fewer rows" for path in own]
        return Comparison(
            whole=whole,
            split=split,
            troubles=troubles,
            is_drawn=recorded.has_drawn or whole.draws_on_host or bool(own) or self._runner.draws_in_backward,
            is_ordered=any(one.is_ordered for one in replays),
            repeated=lambda only=None: self._whole(RecordDraws(covers_backward=covers_backward), only=only),
            reads_summands=self._reads_summands,
        )

    def _split_runs(
        self, draws: Callable[[int], DrawMode], *, within: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> SplitRuns:
        """Run every micro-batch inside `within()`, in the mode that `draws` returns for its index."""
        trial, sizes = self._trial, self._trial.split
        batches = [trial.rows_from(start, size) for start, size in zip(starts_of(sizes), sizes, strict=True)]

        def run(index: int, factor: float = 1.0, only: str | None = None) -> Run:
            with within():
                return self._micro_batch(batches[index], sizes[index], draws(index), factor=factor, only=only)

        return SplitRuns(sizes=sizes, batches=batches, runs=[run(index) for index in range(len(sizes))], scaled=run)

    def _micro_batch(
        self, batch: Any, size: int, draws: DrawMode, *, factor: float = 1.0, only: str | None = None
    ) -> Run:
        try:
            return self._runner.run(self._trial.kwargs, batch, draws, factor=factor, only=only)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (SplitError, UndoError, RankError)):
                raise
            raise self._failure(error, f"{size} of {self._trial.rows}") from error

    @property
    def _reads_summands(self) -> bool:
        """Whether the summands of the loss may have weights of their own; ranks that hold shards have one weight."""
        return self._runner.has_whole_parameters

    def _whole(self, draws: DrawMode, *, only: str | None = None) -> Run:
        trial, runner = self._trial, self._runner
        run = runner.run if only is None else partial(runner.run, only=only)
        try:
            return run(trial.kwargs, trial.rows_from(0, trial.rows), draws)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (SplitError, UndoError, RankError)):
                raise
            if runner.leaves_out_autocast:  # the module may need autocast
                runner.keeps_autocast = True
                return self._whole(draws, only=only)
            if trial.is_whole:
                raise
            own = runner.failure(trial.kwargs)
            if own is not None and type(own) is type(error):  # the whole batch fails too: raise the user's error
                raise own from None
            raise self._failure(error, f"{trial.rows}") from error

    def _failure(self, error: Exception, rows: str) -> SplitError:
        step = f"{type(self._runner.module).__name__}.training_step"
        return SplitError(
            f"{failure_on_rows(step, rows, error)} In MicroBatchRules: unit=n if n rows belong together, splittable=False to run "
            f"batches whole, or check=False if it is sound on the micro-batches used.{unsplit(self._shared())}",
            is_of_rows=True,
        )

    def _shared(self) -> list[str]:
        """Return the paths of tensors that are as large for one row as for all rows of the trial."""
        one, all_rows = (dict(named_tensors(self._trial.rows_from(0, rows))) for rows in (1, self._trial.rows))
        sizes = {path: tensor.shape for path, tensor in all_rows.items() if tensor.dim() and len(tensor) > 1}
        return [path for path, tensor in one.items() if tensor.shape == sizes.get(path)]
