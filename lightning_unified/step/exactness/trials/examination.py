"""Where a check runs: on the device, with activation checkpointing, or on the CPU."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_unified.errors import ConfigurationError, LightningUnifiedError, SplitError, UndoError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.options.activation_checkpointing import ALL, CheckpointedBlocks
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.losses import LossRule, give_other_shares
from lightning_unified.step.exactness.rows import Check, starts_of
from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.exactness.trials.all_rows import AllRows
from lightning_unified.step.exactness.trials.comparison import Trial
from lightning_unified.step.exactness.trials.host import has_room, may_be_wrong, on_host, to_host
from lightning_unified.step.exactness.trials.judge import Judge
from lightning_unified.step.exactness.trials.run import Runner
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.split import BatchSplitter

__all__ = ["Examination"]

log = logging.getLogger("lightning_unified")

_AT_FIRST = 32  # units of the first check, if they are predicted to fit; judgement: if a tenth of the rows is hard, about three run
_MORE = 6  # judgement: trials for a summand with few terms; each takes a few steps of as many rows
UNITS = 8  # units of rows in later checks; judgement: enough for three unequal micro-batches

_ON_CPU = (
    "Memory ran out in the exactness check of a split, even with %d rows. It runs on the CPU now, which may take minutes for a large module; "
    "a larger budget avoids that."
)
_UNCHECKED = (
    "Memory ran out in the exactness check of a batch, even with %d rows. The batch is split as those that were checked before, "
    "unchecked; a larger budget avoids that."
)


class Examination:
    """Runs the trials of a check.

    Args:
        trainer: The Trainer, in `fit`.
        runner: Runs the step and undoes it.
        splitter: Splits batches.
        tables: The merge rules, which the trials extend.
        fits: Returns whether a number of rows is predicted to fit into memory at once; None without a prediction.
        watch: The memory of the device.
        group: The processes that run the trials.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        runner: Runner,
        *,
        splitter: BatchSplitter,
        tables: Tables,
        fits: Callable[[int], bool | None],
        watch: BudgetWatch,
        group: CheckGroup,
    ) -> None:
        self._trainer, self._runner, self._watch, self._group = trainer, runner, watch, group
        self._splitter, self._tables, self._fits = splitter, tables, group.fits(fits)
        self._largest: int | None = None
        self._has_said_unchecked = False

    def findings(self, check: Check) -> Findings | str:
        """Return the findings of a check, or why it is undecided.

        Args:
            check: The check to run.

        Raises:
            SplitError: If the whole rows and their micro-batches give different results.
        """
        most = check.rows // check.unit
        if most < 2:
            return f"a batch of {check.rows} rows has no two units to compare"
        units = self._predicted_to_fit(min(check.most, most, self._largest or most), check.unit)
        if check.is_first and self._fits(self._wider * min(most, _AT_FIRST) * check.unit):
            units = max(units, min(most, _AT_FIRST, self._largest or most))
        while True:
            found = self._sound(check, units)
            if found is not None or units == 2:
                break
            units = self._largest = max(units // 2, 2)
        if isinstance(found, str):
            found = self._of_more(check, units, self._largest or most) or found
        if found is None:
            found = self._recomputed(check, units)
        if found is None and self._group.has_whole_parameters and self._watch.device.type != "cpu":
            log.warning(_ON_CPU, units * check.unit)
            try:
                found = self._on_host(check, units)
            except (SplitError, UndoError):
                raise
            except Exception as error:  # the module may use operations that the CPU lacks
                log.info("The exactness check could not run on the CPU either: %s", error)
        if isinstance(found, Findings) and check.is_first:
            found = self._on_all_rows(check, found)
        # of a first check, the verdict says it
        if found is None and not check.is_first and not self._has_said_unchecked:
            self._has_said_unchecked = True
            log.warning(_UNCHECKED, units * check.unit)
        return "memory ran out while it was checked" if found is None else found

    def _on_all_rows(self, check: Check, found: Findings) -> Findings:
        """Compare the losses of all rows too, without gradients, and return the rules that hold for them.

        It is left out where random draws would change the loss, and where nothing stops a process that takes too much memory. Where
        all rows ran and gradients are enough to go by, it says nothing new.
        """
        if (found.rows >= check.rows and not found.is_thin) or self._runner.draws_in_eval:
            return found
        return replace(found, agreeing=self.rules_of_all_rows(check, found.agreeing))

    def most_units(self, asked: Request, *, is_first: bool) -> int:
        """Return the largest number of units that a check runs; `is_first` for the first of the fit."""
        if asked.is_as_split and asked.differing and self._may_run(asked.rows):
            return asked.rows // asked.unit
        return max(asked.micro_batch_size // asked.unit, UNITS) if asked.differing or is_first else UNITS

    def _may_run(self, rows: int) -> bool:
        """Return whether rows may run at once: they are predicted to fit, or the allocator has a cap."""
        return self._watch.device.type in ("cuda", "mps") or bool(self._fits(rows))

    def rules_of_all_rows(self, check: Check, rules: Sequence[LossRule]) -> Sequence[LossRule]:
        """Return the rules that give the loss of all rows; all rules where these cannot be compared.

        Results are compared too. Nothing has gradients, and where the step draws, the draws are constant.

        Args:
            check: The check of the batch.
            rules: The rules to try.

        Raises:
            SplitError: If none of the rules gives the loss of all rows.
        """
        if not self._may_run(check.rows):
            return rules
        sizes, parts = self._parts(check)
        all_rows = AllRows(self._runner, self._tables, check.kwargs, micro_batches=parts, sizes=sizes)
        try:
            with self._group.trial():
                return all_rows.compare(rules)
        except SplitError:
            if self._decides_on_host:
                with suppress(Exception), self._watch.off_device(), on_host(self._trainer):
                    return all_rows.compare(rules)
            if found := self._rules_by_summand(check):
                return found
            raise
        except LightningUnifiedError:
            raise
        except Exception as error:  # a step that differentiates fails without gradients
            log.debug("The loss of all rows could not be compared: %s", error)
        finally:
            self._runner.release()
        # only here: inside the `except` block, the traceback holds the frames and their tensors
        self._watch.release()
        return rules

    def _rules_by_summand(self, check: Check) -> Sequence[LossRule]:
        """Return the rules with weights for summands under which the batch's own micro-batches agree.

        Fewer rows may have no micro-batch without terms, which tells `loss.sum() / max(terms, 1)` from a mean or a sum.
        """
        own = replace(check, own=check.sizes, is_first=False, differing=range(check.rows))
        with suppress(SplitError):
            found = self._tried(own, check.rows // check.unit) if self._group.has_whole_parameters else None
            return [one for one in found.agreeing if one.summands] if isinstance(found, Findings) else ()
        return ()

    def _of_more(self, check: Check, few: int, units: int) -> Findings | str | None:
        """Repeat an undecided check on as many rows as are predicted to fit.

        Few rows may lack the rare rows that decide a check. Return None if no more rows are predicted to fit, or memory runs out.
        """
        while units > few and not self._fits(self._wider * units * check.unit):
            units //= 2
        return self._sound(check, units) if units > few else None

    @property
    def _decides_on_host(self) -> bool:
        """Whether the CPU repeats a refusal of the device."""
        return self._group.has_whole_parameters and may_be_wrong(self._trainer.strategy.root_device)

    def _predicted_to_fit(self, units: int, unit: int) -> int:
        while units > 2 and self._fits(self._wider * units * unit) is False:
            units = max(units // 2, 2)
        return units

    @property
    def _wider(self) -> int:
        """The factor of a check's memory over training's.

        It is 2 with autocast, because a check runs in float32.
        """
        return 2 if isinstance(self._trainer.precision_plugin, MixedPrecision) else 1

    def _sound(self, check: Check, units: int) -> Findings | str | None:
        """Return the findings on the device; the CPU repeats a refusal that may be wrong.

        It does so in float64 where the rounding of float32 may explain it. Its findings replace the refusal if it agrees.
        """
        try:
            return self._tried(check, units)
        except SplitError as error:
            refusal = error.with_traceback(None)  # it holds the frames and their tensors
        formats = [torch.float32] if self._decides_on_host else []
        if refusal.may_be_rounding and self._fits_in_float64(units * check.unit):
            formats.append(torch.float64)
        for least in formats:
            try:
                found = self._on_host(check, units, least)
            except UndoError:
                raise
            except Exception as error:  # the refusal stands, unless the rows agree
                log.debug("A refused split does not agree on the CPU in %s: %s", least, error)
                continue
            if isinstance(found, Findings):
                return found
        raise refusal

    def _fits_in_float64(self, rows: int) -> bool:
        fits = self._group.has_whole_parameters and not (self._watch.counts_process and self._fits(2 * rows) is False)
        return fits and has_room(self._trainer.lightning_module, torch.float64)

    def _recomputed(self, check: Check, units: int) -> Findings | str | None:
        try:
            blocks = CheckpointedBlocks(self._trainer.lightning_module, ALL)
        except ConfigurationError:  # the module has no blocks, or recomputes activations already
            return None
        try:
            return self._tried(check, units)
        finally:
            blocks.undo()

    def _on_host(self, check: Check, units: int, least: torch.dtype = torch.float32) -> Findings | str | None:
        def take(batch: Any, start: int, stop: int, *, rows: int) -> Any:
            return to_host(self._splitter.split(batch, start, stop, rows=rows), least)

        with self._watch.off_device(), on_host(self._trainer, least):
            return self._tried(check, units, take=take)

    def _tried(self, check: Check, units: int, take: Callable[..., Any] | None = None) -> Findings | str | None:
        """Return the findings on windows of `units` units of rows; None if memory runs out.

        Undecided windows count only where all are.
        """
        rows = units * check.unit
        found: list[Findings | str] = []
        for start in check.starts(rows):
            trial = Trial(
                kwargs=check.kwargs,
                batch_rows=check.rows,
                start=start,
                rows=rows,
                take=take or self._splitter.split,
                split=check.split(units),
                is_quiet=not self._runner.draws_in_eval and (check.is_first or not self._runner.hides_code),
                of_summands=check.of_summands,
            )
            if (one := self._tried_once(check, trial)) is None:
                return None
            found.append(one)
        decided = [one for one in found if isinstance(one, Findings)]
        return reduce(Findings.joined, decided) if decided else found[0]

    def _tried_once(self, check: Check, trial: Trial) -> Findings | str | None:
        """Return the findings of one trial, confirmed in a first check; None if memory runs out."""
        judge = Judge(self._runner, self._tables)
        try:
            with self._group.trial():
                found = judge.findings(trial, check.rules, since=check.since)
                if not isinstance(found, str) and check.is_first:
                    found = self._confirmed(check, judge, trial, found)
                return found if isinstance(found, str) else self._told(check, judge, trial, found)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            self._runner.release()
        # only here: inside the `except` block, the traceback holds the frames and their tensors
        self._watch.release()
        return None

    def _confirmed(self, check: Check, judge: Judge, trial: Trial, found: Findings) -> Findings | str:
        """Repeat the first check on another split, and with dropout if the module has any.

        Two splits distinguish a mean weighted by rows from sums and constants. A few rows are enough for that, and for the noise.
        """
        own = [rule for rule in found.agreeing if rule.summands]
        rules = own or [rule for rule in check.rules if rule.name not in found.rejected]
        judged = partial(judge.findings, rules=rules, since=check.since)
        all_units = trial.rows // check.unit
        units = min(all_units, UNITS)
        again = self._again(check, trial, units)
        if again.is_quiet and again.split == trial.split:  # two units have only one split
            return found
        other = judged(again)
        if isinstance(other, str) and units < all_units:  # a few rows leave the check undecided
            other = judged(self._again(check, trial, all_units))
        return other if isinstance(other, str) else found.joined(other)

    def _again(self, check: Check, trial: Trial, units: int) -> Trial:
        size = units * check.unit
        return replace(
            trial,
            start=check.window(size),
            rows=size,
            split=check.split(units, other=True),
            is_quiet=not self._runner.has_dropout and not self._runner.draws_in_eval,
        )

    def _told(self, check: Check, judge: Judge, trial: Trial, found: Findings) -> Findings:
        """Repeat a check on other rows while rules are left for a summand of the loss that differ for this batch."""
        # the split of training, under which the rules differ, first
        own = [self._parts(check)[0]] if trial.is_whole else []
        splits, half = [*own, *check.splits(trial.rows // check.unit)], max(trial.rows // 2, check.unit)
        for number in range(_MORE if found.agreeing[0].has_several else 0):
            if not self._is_open(check, found.agreeing[0]):
                break
            start = (trial.start + (number + 1) * half) % (check.rows - trial.rows + 1) // check.unit * check.unit
            sizes = splits[number % len(splits)]
            other = judge.findings(replace(trial, start=start, split=sizes), found.agreeing, since=check.since)
            found = found if isinstance(other, str) else found.joined(other)
        return found

    def _is_open(self, check: Check, rule: LossRule) -> bool:
        """Return whether the rules that are left for a summand of the loss differ for this batch."""
        sizes, parts = self._parts(check)
        return any(one.is_open and give_other_shares(one.rules, parts, sizes) for one in rule.summands)

    def _parts(self, check: Check) -> tuple[Sequence[int], list[Any]]:
        """Return the rows of each micro-batch in training, and the micro-batches."""
        places = zip(starts_of(check.sizes), check.sizes, strict=True)
        return check.sizes, [
            self._splitter.split(check.batch, start, start + rows, rows=check.rows) for start, rows in places
        ]
