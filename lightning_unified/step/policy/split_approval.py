"""The permission to split a batch, and the weights: declared rules and the check's verdict."""

import logging
from typing import Any, Literal

import lightning as L

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.losses import LossRule, declared
from lightning_unified.step.exactness.verdict import (
    Passes,
    Verdict,
    batch_norms_of,
    refuse_batch_norm,
    refuse_counting_embeddings,
)
from lightning_unified.step.policy.batch_rules import BatchRules
from lightning_unified.step.policy.notices import Notices
from lightning_unified.step.recovery.budget_watch import BudgetWatch

__all__ = ["SplitApproval"]

log = logging.getLogger("lightning_unified")


class SplitApproval:
    """Allows or refuses to split training batches, and chooses the weights of micro-batches.

    Args:
        batches: The rules of the batches.
        notices: Receives notes on split batches for the user.
        watch: Clears the device's caches after a check.
        batch_norm: Whether BatchNorm in train mode refuses the split, unless the rules decide: `"refuse"` or `"micro"`.
        events: The run's events.

    Attributes:
        verdict: The last verdict of the exactness check; None before the first check.
        has_idle_norms: Whether the step has run, and none of its BatchNorm layers with statistics of the batch.
        refusal: Why batches run whole from now on; None where they may be split.
    """

    def __init__(
        self,
        batches: BatchRules,
        *,
        notices: Notices,
        watch: BudgetWatch,
        batch_norm: Literal["refuse", "micro"],
        events: list[str],
    ) -> None:
        self._batches, self._notices, self._watch = batches, notices, watch
        self._batch_norm, self._events = batch_norm, events
        self.begin(None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without the module and findings about it."""
        return {**vars(self), "_module": None, "verdict": None, "refusal": None}

    def begin(self, module: L.LightningModule | None) -> None:
        """Begin a fit or an evaluation of `module`."""
        self._module = module
        self.verdict: Verdict | None = None
        self.refusal: SplitError | None = None
        self.has_idle_norms = False

    @property
    def accepts_batch_norm(self) -> bool:
        """Whether BatchNorm in train mode may have statistics of micro-batches."""
        return (self._batches.of("fit").batch_norm or self._batch_norm) == "micro"

    def require(self, rows: int, *, micro_batch_size: int, checks_norms: bool = False) -> None:
        """Raise `SplitError` if a batch cannot be split exactly, by the rules or by a check.

        Args:
            rows: The number of rows of the batch.
            micro_batch_size: The rows of its largest micro-batch.
            checks_norms: Whether a check of the batch follows, which refuses the BatchNorm layers that run in train mode. Otherwise their
                modes before the step decide.
        """
        module = self._module
        assert module is not None
        if self.refusal is not None:
            raise self.refusal
        rules = self._batches.of("fit")
        if not rules.splittable:
            raise SplitError(
                f"the rules of {type(module).__name__} say splittable=False and its batch of {rows} rows must run in micro-batches of "
                f"{micro_batch_size}; raise the budget or the micro-batch size, or use a smaller batch."
            )
        if self._batches.checks("fit"):
            refuse_counting_embeddings(module)
        if not self.accepts_batch_norm:
            if not (checks_norms or self.has_idle_norms):
                refuse_batch_norm(module, within=rules.encoders)
        elif batch_norms_of(module):
            self._notices.say(
                'BatchNorm\'s statistics are those of micro-batches where a batch is split, as batch_norm="micro" accepts.',
                log.info,
            )

    def may_have_idle_norms(self, rows: int) -> bool:
        """Return whether only BatchNorm in train mode refuses a batch of `rows` rows.

        A check would tell whether the step runs these layers.
        """
        if not self._batches.checks("fit") or self._batches.of("fit").encoders or not self.refuses(rows):
            return False
        try:
            self.require(rows, micro_batch_size=rows, checks_norms=True)
        except SplitError:
            return False
        return True

    def refuses(self, rows: int) -> bool:
        """Return whether a batch of `rows` rows is known not to split exactly."""
        return bool(self.obstacle(rows))

    def obstacle(self, rows: int) -> str:
        """Return why a batch of `rows` rows has no exact split; empty if no reason is known."""
        try:
            self.require(rows, micro_batch_size=rows)
        except SplitError as error:
            return str(error)
        return ""

    def record(self, verdict: Verdict) -> None:
        """Keep the verdict of an exactness check; note for the user how results will differ.

        The caches that the check filled are cleared. Otherwise a GPU's first step would be laid out around them, which
        took up to a tenth more memory.
        """
        before = self.verdict
        if verdict is before:
            return
        if self._watch.device.type != "cpu":
            self._watch.release()
        if not verdict.conclusive and (before is None or before.conclusive):
            log.warning("Micro-batches are weighted by %s.", verdict.reason)
        is_new = before is None or (verdict.rule.name, verdict.conclusive) != (before.rule.name, before.conclusive)
        if is_new and (not verdict.conclusive or verdict.rule.name != "rows"):
            self._events.append(f"micro-batches weighted by {verdict.reason}")
        if verdict.noise:
            self._notices.say(verdict.noise, log.warning if "compared without" in verdict.noise else log.info)
        self._notices.say_unmergeable(verdict.unmergeable, phase="training")
        for path in verdict.left:
            self._notices.say(f"{path} is written once a micro-batch of a split batch, not once a batch.")
        self.verdict = verdict

    @property
    def loss_rule(self) -> LossRule:
        """How micro-batches are weighted: as declared, else as the check found, else by rows."""
        own = declared(self._batches.of("fit"))
        return own or (LossRule("rows") if self.verdict is None else self.verdict.rule)

    @property
    def passes(self) -> Passes:
        """How the passes of micro-batches must run, as far as checks have shown."""
        return Passes() if self.verdict is None else self.verdict.passes

    @property
    def is_exact(self) -> bool:
        """Whether a check has shown that the micro-batches' gradients add up to the batch's."""
        return self.verdict is not None and self.verdict.conclusive

    @property
    def reason(self) -> str:
        """How micro-batches are weighted and how that is known, for `Plan.reasons`."""
        if self.verdict is not None:
            return self.verdict.reason
        if self._module is not None and self._batches.of("fit").encoders:
            return "the loss is the whole batch's own; encoders run in chunks of rows"
        if self._batches.checks("fit"):
            return "no batch has been split"
        return "as declared, else rows; unchecked (check_split=False)"
