"""The schedule of the exactness check, and its outcome: loss and merge rules, or a refusal.

A check runs some rows of the batch whole, and the same rows in three unequal micro-batches. It compares the gradient of each parameter,
returned and logged values, and written state. One check sees only a sample of the data, so a check runs:

1. before the first split batch, on as many rows as fit at once; then again on a few rows, with another split and with dropout;
2. before split batches 2, 4, 8, 16, … on at most 8 units of rows, unless one of the last quarter of the batches was checked;
3. before the update of a batch with new facts: label values, zeros, masks, lengths, missing values (`facts.profile`), or other operations near
   the loss (`facts.graph`);
4. before the update of a batch for which two rules that agreed so far give different weights;
5. before the update of a batch whose micro-batches lie on other sides of the loss's bends than those of all earlier batches (`facts.bends`),
   on the rows of a micro-batch that lies on both sides, or first hold a log, an output or a written number at a level (`facts.levels`);
6. before each of the next batches, up to 16, while a single micro-batch of every check had a gradient;
7. before each of the next batches after an undecided check, until three checks in a row were undecided;
8. while no check could decide, before the update of a batch that has a gradient, or whose micro-batches differ in the loss's bends.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.step.exactness.agreement import AgreedRules, LastAgreement
from lightning_unified.step.exactness.facts.bends import NOT_FINITE, LossBends, are_mixed, left_out_before
from lightning_unified.step.exactness.facts.carried import OF_ALL_ROWS
from lightning_unified.step.exactness.facts.figures import HostFigures
from lightning_unified.step.exactness.facts.graph import GraphFact
from lightning_unified.step.exactness.facts.levels import Levels
from lightning_unified.step.exactness.facts.of_batch import BatchFacts
from lightning_unified.step.exactness.facts.profile import BatchProfiles, Fact
from lightning_unified.step.exactness.findings import Findings
from lightning_unified.step.exactness.group import CheckGroup, Request, compared
from lightning_unified.step.exactness.losses import LossRule, likeliest
from lightning_unified.step.exactness.rows import Check
from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.exactness.trials.examination import Examination
from lightning_unified.step.exactness.trials.run import Runner
from lightning_unified.step.exactness.verdict import Passes, Verdict
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.split import BatchSplitter

__all__ = ["ExactnessCheck"]

_THIN = 16  # batches checked while a single micro-batch of each check had a gradient; judgement
_MOVING = 32  # undecided checks in a row after which a gradient asks for no further one; judgement: memory may run out in each
_RETRIES = 3  # undecided checks in a row that are repeated on the next batch; after that the schedule decides


class ExactnessCheck:
    """Decides whether batches may be split, and how their results merge.

    Args:
        trainer: The Trainer, in `fit`.
        rules: The rules that the module declares for its batches.
        splitter: Splits batches.
        step: Runs `training_step` as the loop does.
        fits: Returns whether a number of rows is predicted to fit into memory at once; None without a prediction.
        watch: The memory of the device.
        make_room: Is called before each comparison.
        group: The processes that run each check.

    Attributes:
        tables: The merge rules for outputs, logs, metrics and written state.
        host_figures: Figures of the batch's tensors, from before they were moved to the device.
        levels: The levels of logged and returned numbers in the batches so far.
        summands: Reads the summands of losses.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        rules: MicroBatchRules,
        splitter: BatchSplitter,
        step: Callable[["OrderedDict[str, Any]"], ClosureResult],
        fits: Callable[[int], bool | None],
        watch: BudgetWatch,
        make_room: Callable[[], None] = lambda: None,
        group: CheckGroup | None = None,
    ) -> None:
        self._group = group or CheckGroup()
        self._trainer, self._rules, self._splitter, self._make_room = trainer, rules, splitter, make_room
        self.tables, self.host_figures, self.levels = Tables.of(rules.merge), HostFigures(), Levels()
        self._runner = Runner(trainer, step=step, group=self._group)
        self.summands = self._runner.summands
        self._examination = Examination(
            trainer, self._runner, splitter=splitter, tables=self.tables, fits=fits, watch=watch, group=self._group
        )
        self._profiles, self._undecided_bends = BatchProfiles(), BatchProfiles()
        self._batch_facts = BatchFacts(trainer, self._runner.counters, self.host_figures, self.tables.written)
        self._agreed, self._last, self._passes = AgreedRules(rules), LastAgreement(), Passes()
        self._verdict: Verdict | None = None
        self._batches, self._checks, self._undecided, self._thin = 0, 0, 0, 0
        self._seen: tuple[int, int] | None = None
        self._checked_at: int | None = None  # the last batch of which a process of the group checked its own
        self._own_checked_at, self._own_checked = -1, range(0)  # this process's own, and the rows of that check
        self._remembered: dict[str, Any] | None = None

    def verdict(self, own: Request, *, batch_idx: int) -> Verdict:
        """Return the verdict for a batch, after a check of the batch if one is due.

        Args:
            own: The batch.
            batch_idx: The number of the batch in the epoch.

        Raises:
            SplitError: If no rule merges the micro-batches' results into the whole batch's: the batch cannot be split exactly.
        """
        self.host_figures.is_wanted = True
        now = (self._trainer.current_epoch, batch_idx)
        if now != self._seen:
            self._seen, self._batches = now, self._batches + 1
        own = replace(own, facts=self._facts(own))
        if self._verdict is not None and any(kind in OF_ALL_ROWS for _, kind, _ in self._profiles.news(own.facts)):
            own = replace(own, micro_batches=own.sizes)
        if self._checked(own, is_due=lambda: self._is_due(own)):
            # the facts again: the check may have recorded that the step reads counters
            self._profiles.add(self._facts(own))
        assert self._verdict is not None
        self._verdict = self._verdict.without_rules_for(self._unmergeable)  # batches since then may have refuted rules
        return self._verdict

    def attend(self, own: Request) -> Verdict | None:
        """Take part in the checks of other processes of the group; return the verdict so far."""
        self._checked(own, is_due=lambda: False)
        return self._verdict

    def _checked(self, own: Request, *, is_due: Callable[[], bool]) -> bool:
        """Check each batch of a process that is due; return whether this one's was among them.

        The facts about a batch that another process asks for are then known here too.
        """
        is_done = False
        while (asked := self._group.next(own, asks=not is_done and is_due())) is not None:
            known, rule = self.tables.paths, self._agreed.first
            rows = self._own_checked if asked.is_checked else self._check(asked)
            # few rows may do alike, such as `x[:16]`, or agree by chance, what all rows do in another way
            is_new = self._checks > 1 and (not self.tables.paths <= known or rule not in ("", self._agreed.first))
            if self._group.anywhere(is_new) or asked.micro_batches:
                self._require_all_rows(replace(asked, micro_batches=asked.micro_batches or asked.sizes))
            self._profiles.add(asked.facts)
            if asked is own:
                is_done, self._own_checked_at, self._own_checked = True, self._batches, rows
        return is_done

    def batch_on_host(self, batch: Any) -> Any:
        """Return the batch as it is on the host, for rules that read a field; None if it cannot be split there."""
        return None if self._rules.rows.split is not None else self.host_figures.batch_on_host(batch)

    def _facts(self, own: Request) -> frozenset[Fact]:
        """Return all facts that may decide how a step computes on this batch."""
        return self._batch_facts.of(own.batch, own.rows, self._seen or (0, 0)) | own.own_facts

    def state_dict(self) -> dict[str, Any] | None:
        """Return the findings for a checkpoint; None before the first conclusive check."""
        if self._verdict is None or not self._verdict.conclusive:
            return None if self._remembered is None else dict(self._remembered)
        kept = {"noise": self._verdict.noise, "passes": asdict(self._passes)}
        return {**self._agreed.state_dict(), **kept, **self.tables.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Keep the findings of the continued run, for batches that a check cannot decide."""
        self._remembered = state

    def _recalled(self) -> Verdict | None:
        """Return the verdict of the run that this run continues; None if it no longer holds."""
        state = self._remembered
        if state is None or not self._agreed.load_state_dict(state):
            return None
        self.tables.load_state_dict(state)
        return Verdict.recalled(self._agreed.agreeing[0], state, self._unmergeable)

    def learn_more(
        self, own: Request, table: MergeTable, paths: Sequence[str], decides: Callable[[str], bool]
    ) -> Verdict:
        """Check a batch whose step gave a result that no check has seen; return the new verdict.

        A result for which the rules do not decide after the check is recorded as unmergeable. `table` is the member of `tables` whose rules
        do not decide for `paths`, of which there may be none.
        """
        assert self._verdict is not None
        if not self._verdict.conclusive:  # checks of such batches were undecided
            if table is self.tables.written:
                left = tuple(sorted({*self._verdict.left, *paths}))
                self._verdict = self._verdict if left == self._verdict.left else replace(self._verdict, left=left)
            return self._verdict
        is_seen = self._own_checked_at == self._batches and len(self._own_checked) == own.rows
        is_due = bool(paths) and not (is_seen and all(map(decides, paths)))
        self._checked(replace(own, micro_batches=own.sizes), is_due=lambda: is_due)
        for path in paths:
            if not decides(path):
                table.reject(path)
        if paths:
            left = tuple(sorted(self.tables.written.unmergeable))
            self._verdict = replace(self._verdict, unmergeable=self._unmergeable, left=left)
        return self._verdict

    def see_graph(self, own: Request, graph: GraphFact | None) -> Verdict:
        """Check a batch whose loss was computed by other operations than in all batches that were checked.

        Return the verdict. `graph` is that of the batch's first micro-batch, None if that had no loss.

        Raises:
            SplitError: If the batch cannot be split exactly.
        """
        assert self._verdict is not None
        facts: frozenset[Any] = frozenset() if graph is None else frozenset({graph})
        if self._verdict.conclusive:
            is_new = self._own_checked_at != self._batches
            self._checked(replace(own, facts=facts), is_due=lambda: is_new and bool(self._profiles.news(facts)))
        self._profiles.add(facts)
        return self._verdict

    def see_bends(self, own: Request, bends: LossBends, micro_batches: Sequence[int]) -> Verdict:
        """Check a batch whose loss bends a value in another way than in all batches before it.

        Where micro-batches differ, the losses of all rows are compared too, and the rows of a micro-batch on both sides are checked: other
        rows may all lie on one side. Return the verdict. `bends` are those of the batch's micro-batches, `micro_batches` their rows.

        Raises:
            SplitError: If the batch cannot be split exactly.
        """
        assert self._verdict is not None
        if not self._verdict.conclusive and not self._see_undecided(own, bends, micro_batches).conclusive:
            return self._verdict
        facts, is_checked = bends.facts(), self._own_checked_at == self._batches
        news = self._profiles.news(facts)
        without = left_out_before(news)
        has_begun = self._profiles.news(without) != without  # few rows may lack terms of what a 0 left out so far
        compared = micro_batches if has_begun or are_mixed(news) else ()
        mixed = range(own.rows) if has_begun else bends.mixed_rows(news, compared) if compared else range(0)
        is_checked = is_checked and {*mixed} <= {*self._own_checked} and NOT_FINITE not in news
        own = replace(own, facts=facts, is_checked=is_checked, micro_batches=compared, differing=mixed)
        self._checked(own, is_due=lambda: bool(self._profiles.news(facts)))
        self._profiles.add(facts)
        return self._verdict

    def _see_undecided(self, own: Request, bends: LossBends, micro_batches: Sequence[int]) -> Verdict:
        """Check a batch that may decide, while no check could; return the verdict."""
        rows, facts = bends.moving_rows(micro_batches), bends.facts()
        is_new = are_mixed(self._undecided_bends.news(facts))
        is_due = is_new or (bends.moving is not None and self._undecided < _MOVING)
        for is_as_split in (False, True):  # other micro-batches than its own may all lie on one side
            asked = replace(own, micro_batches=micro_batches, differing=rows, is_as_split=is_as_split)
            self._checked(asked, is_due=lambda: is_due)
        self._undecided_bends.add(facts)
        assert self._verdict is not None
        return self._verdict

    @property
    def _is_thin(self) -> bool:
        """Whether no conclusive check yet had gradients in two micro-batches."""
        return self._thin > 0 or self._verdict is None or not self._verdict.conclusive

    @property
    def _unmergeable(self) -> tuple[str, ...]:
        return tuple(sorted({*self.tables.unmergeable}))

    def _is_due(self, own: Request) -> bool:
        number, verdict = self._batches, self._verdict
        is_scheduled = number & (number - 1) == 0 and 4 * (self._checked_at or 0) <= 3 * number
        if verdict is None or self._profiles.news(own.facts) or is_scheduled:
            return True
        if not verdict.conclusive:
            return self._checked_at != number and self._undecided < _RETRIES
        if 0 < self._thin < _THIN and self._checked_at != number:
            return True
        return self._agreed.are_several and self._is_ambiguous(own.batch, own.sizes)

    def _is_ambiguous(self, batch: Any, sizes: Sequence[int]) -> bool:
        """Return whether rules that agreed so far weight this batch's micro-batches differently."""
        if len(sizes) < 2:
            return False
        batch = batch if (on_host := self.batch_on_host(batch)) is None else on_host
        return self._agreed.give_other_shares(self._splitter.micro_batches(batch, sizes), sizes)

    def _new_check(self, asked: Request) -> Check:
        self._runner.allows_batch_norm = asked.allows_batch_norm
        known = asked.batch, asked.rows, self.host_figures.ignored, self._runner.scorings
        return Check(
            kwargs=asked.kwargs,
            rules=self._agreed.candidates(*known),
            of_summands=self._agreed.of_summands(*known),
            rows=asked.rows,
            unit=asked.unit,
            micro_batch_size=asked.micro_batch_size,
            most=self._examination.most_units(asked, is_first=not self._checks),
            number=self._checks,
            is_first=self._verdict is None or not self._verdict.conclusive or self._thin > 0,
            since=self._last.since(self._trainer.global_step, self._batches),
            micro_batches=asked.micro_batches,
            differing=asked.differing,
            ignored=self.host_figures.ignored,
            least=asked.least,
            own=asked.sizes if asked.is_as_split else (),
            is_fine=NOT_FINITE in asked.facts,
        )

    def _require_all_rows(self, asked: Request) -> None:
        """Compare the losses of all rows, and keep the rules that give them: few rows may agree by chance."""
        self._make_room()
        check = self._new_check(asked)
        named = [rule for rule in check.rules if not rule.is_guess]  # no gradient speaks for a guess before any agreed
        rules = self._agreed.agreeing or named or check.rules
        found = compared(lambda: Findings.of_losses(self._examination.rules_of_all_rows(check, rules)))
        left = self._group.agreed(found, rules)
        if self._verdict is not None:
            self._verdict = self._verdict.under(self._agreed.keep(left)).without_rules_for(self._unmergeable)

    def _findings(self, asked: Request, tries: int = 3) -> tuple[Findings | str, Sequence[LossRule]]:
        """Return the findings of all processes, or why they are undecided; and the rules of the check."""
        check, known = self._new_check(asked), frozenset(self._runner.scorings)
        self._runner.scorings.clear()
        found = compared(lambda: self._examination.findings(check))
        self.host_figures.ignored |= {one.ignore_index for one in self._runner.scorings}
        is_new = self._group.anywhere(not self._runner.scorings <= known)
        may_lack = is_new and tries > 1  # rules: the labels that the loss ignores, or its class weights
        try:
            agreed = self._group.agreed(found, check.rules)
            if not may_lack or isinstance(agreed, str) or not all(rule.is_guess for rule in agreed.agreeing):
                return agreed, check.rules
        except SplitError as refusal:
            if not may_lack or not refusal.is_for_rules:
                raise
        return self._findings(asked, tries - 1)

    def _check(self, asked: Request) -> range:
        """Check a batch, and return the rows that ran; none if the check is undecided."""
        self._make_room()
        compare = self._group.on_few_rows(asked, self._findings)
        found, rules = self._splitter.trimming_if_needed(asked.batch, compare, anywhere=self._group.anywhere)
        self._checks, self._checked_at = self._checks + 1, self._batches
        if isinstance(found, str):
            self._runner.require_known_batch_norm()
            self._undecided += 1
            if self._verdict is None or not self._verdict.conclusive:
                self._verdict = self._recalled() or Verdict.unchecked(likeliest(rules), found, self._unmergeable)
            return range(0)
        self._undecided, self._thin = 0, self._thin + 1 if found.is_thin and self._is_thin else 0
        self._agreed.add(found)
        self._last = LastAgreement.now(self._trainer, self._batches)
        self._passes = self._passes.after(found, reads_gradients=self._runner.reads_gradients)
        self._verdict = Verdict.found(found, self._unmergeable, self._passes)
        return range(found.first, found.first + found.rows)
