"""The decision how a batch runs: whole, or in micro-batches that the check approved."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from lightning_unified.errors import ConfigurationError, SplitError
from lightning_unified.nn.cuda_graphs import release_recordings
from lightning_unified.step.encoders import encoders_of
from lightning_unified.step.exactness.check import ExactnessCheck
from lightning_unified.step.exactness.facts.bends import LossBends
from lightning_unified.step.exactness.facts.decisions import BatchDecisions, Decisions
from lightning_unified.step.exactness.facts.graph import GraphFact
from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.losses import Weighting
from lightning_unified.step.exactness.verdict import Passes, batch_norms_of
from lightning_unified.step.loop.closure import overrides, reads_batch
from lightning_unified.step.loop.outside_writes import OutsideWrites
from lightning_unified.step.loop.split_batch import SplitBatch, WholeBatch
from lightning_unified.step.loop.split_results import SplitResults
from lightning_unified.step.loop.split_summands import SplitSummands
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.undone_run import parameters_of_step
from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.split import BatchShape
from lightning_unified.step.undo import TRAINING_STEP, StateWatch, roots_of

__all__ = ["CheckedSplitter", "ReweightedError"]


_OTHER_PASSES = (
    "a check of this batch found that its backward pass is not proportional to the loss, or that training_step reads gradients of the batch before, after "
    "its micro-batches had run otherwise. Do either from the first batch on, or declare MicroBatchRules(splittable=False) to run batches whole."
)


class ReweightedError(Exception):
    """A check of a batch found other weights than its micro-batches had; the batch is to be repeated."""


class CheckedSplitter:
    """Splits training batches by the policy, once the exactness check has approved the split.

    Args:
        trainer: The Trainer of the fit.
        policy: The micro-batch sizes and the permission to split.
        step: Runs `training_step` with given arguments, as the loop does.
        fits: `fits(rows)` returns whether `rows` rows are predicted to fit as one micro-batch; None where nothing is predicted.
        metrics: Returns the module's torchmetrics objects, by path.
        note_check: Is called before each exactness check.

    Attributes:
        before_refusal: Is called when a batch cannot be split exactly, before it runs whole or the error is raised. It may raise another
            error, if the check compared garbage.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: MemoryPolicy,
        *,
        step: Callable[["OrderedDict[str, Any]"], ClosureResult],
        fits: Callable[[int], bool | None],
        metrics: Callable[[], Mapping[str, Metric]],
        note_check: Callable[[], None],
    ) -> None:
        self._trainer, self._policy, self._step, self._metrics = trainer, policy, step, metrics
        self._rules, self.splitter = policy.batches.of("fit"), policy.batches.splitter("fit")
        self._is_checked = policy.batches.checks("fit")
        self._encoders = encoders_of(trainer, policy, "fit")
        self._written = StateWatch(partial(roots_of, trainer.lightning_module, trainer, TRAINING_STEP))
        self._fits, self._note_check = fits, note_check
        self._moves_by_hook = _moves_by_hook(trainer)
        self._group, self._decisions = CheckGroup(), Decisions(trainer.lightning_module)
        self.before_refusal: Callable[[], None] = lambda: None
        self.check = self._new_check()

    def batch_moved(self, host: Any, moved: Any) -> None:
        """Let the check read a batch on the host, before its transfer to the device.

        It does not if a user's hook may change the batch on the way.
        """
        if not self._moves_by_hook:
            self.check.host_figures.note(host, moved)

    def check_together(self, group: CheckGroup) -> None:
        """Let the processes of a group run each check together, from the first batch on."""
        self._group = group
        self.check = self._new_check()

    def forget_check(self) -> None:
        """Drop all findings of the exactness check, where a check may have compared garbage."""
        self.check = self._new_check()

    def _new_check(self) -> ExactnessCheck:
        rules, splitter = self._rules, self.splitter
        return ExactnessCheck(
            self._trainer,
            rules=rules,
            splitter=splitter,
            step=self._decisions.watched(self._step),
            fits=self._fits,
            watch=self._policy.watch,
            make_room=self._make_room,
            group=self._group,
        )

    def _make_room(self) -> None:
        """Free CUDA graphs where memory is scarce, because a check runs eagerly beside them."""
        self._note_check()
        watch = self._policy.watch
        reserved = watch.reading().reserved.bytes
        if reserved is not None and 2 * reserved > watch.bytes:
            release_recordings(self._trainer.lightning_module)

    def split(
        self, kwargs: "OrderedDict[str, Any]", whole: Callable[[], ClosureResult], *, batch_idx: int
    ) -> WholeBatch | SplitBatch:
        """Return the batch as it will run: whole if it fits or has no countable rows, else split.

        Args:
            kwargs: The arguments of `training_step`, the batch first.
            whole: Runs `training_step` on the whole batch.
            batch_idx: The batch's number in the epoch.

        Raises:
            SplitError: If the batch is too large and cannot be split exactly.
        """
        policy, sizes = self._policy, self._policy.sizes
        batch = next(iter(kwargs.values()))
        shape = None if sizes.runs_whole else self.splitter.require_shape(batch)
        if shape is None or len(rows := sizes.micro_batches(shape)) == 1:
            return WholeBatch(whole)
        checks_norms = self._is_checked and self._encoders is None
        policy.splits.require(shape.rows, micro_batch_size=sizes.micro_batch_size(shape), checks_norms=checks_norms)
        if self._encoders is not None:
            return WholeBatch(partial(self._encoders.run, whole, rows=max(rows), most=policy.most_chunks))
        try:
            self.splitter.require_rows(batch, shape.rows)
            self._require_exact(kwargs, shape, batch_idx=batch_idx)
            policy.splits.has_idle_norms = checks_norms
            split = self._micro_batches(kwargs, shape, rows)
        except SplitError as refusal:
            self.before_refusal()
            if policy.sizing.goes_whole(refusal):
                return WholeBatch(whole)
            raise
        if overrides(self._trainer, "on_before_backward"):
            policy.notices.say_per_micro_batch(
                "the hook on_before_backward runs",
                "What it logs is merged; keep other state of losses in on_train_batch_end.",
            )
        return split

    def _micro_batches(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, rows: list[int]) -> SplitBatch:
        key, batch = next(iter(kwargs.items()))
        self._policy.notices.say_sized(self.check.tables.sized)
        self._policy.notices.say_varying(self.check.tables.varying, phase="training")
        self._policy.notices.say_drawn_state(self.check.tables.written.drawn, phase="training")
        if self.splitter.trims:
            self._policy.notices.say_trimmed(phase="training")
        micro_batches = self.splitter.micro_batches(batch, rows)
        weighting = partial(self._weighting, batch, micro_batches, rows)
        used = weighting()
        if self.check.tables.written.paths:
            self._decisions.note_from_now_on()
        splits = self._policy.splits
        keeps = partial(self._require_weights, used, weighting, splits.loss_rule.name, splits.passes)
        return SplitBatch(
            [partial(self._step, OrderedDict(kwargs, **{key: one})) for one in micro_batches],
            used,
            summands=self._split_summands(used),
            merging=SplitResults(
                self.check.tables,
                results=self._trainer.fit_loop.epoch_loop._results,
                metrics=self._metrics(),
                state=self._written if self._is_checked else None,
                ignored=batch_norms_of(self._trainer.lightning_module)
                if self._policy.splits.accepts_batch_norm
                else (),
                learn=_then(partial(self._learn_more, kwargs, shape), keeps),
            ),
            parameters=parameters_of_step(self._trainer),
            outside=OutsideWrites(self._trainer, batch, micro_batches, rows, is_read=reads_batch(self._trainer)),
            see_graph=_then(partial(self._see_graph, kwargs, shape), keeps),
            see_bends=_then(partial(self._see_bends, kwargs, shape, rows), keeps),
            is_checked=self._is_checked,
            levels=self.check.levels,
            decisions=BatchDecisions(self._decisions),
            reads_gradients=splits.passes.reads_gradients,
            is_decided=splits.is_exact,
        )

    def _split_summands(self, weighting: Weighting) -> SplitSummands | None:
        """Return what weights the summands of the loss; None if the loss has one weight."""
        rule, whose = self._policy.splits.loss_rule, type(self._trainer.lightning_module).__name__
        return SplitSummands(self.check.summands, weighting, rule, whose=whose) if rule.summands else None

    def _weighting(self, batch: Any, micro_batches: Sequence[Any], rows: Sequence[int]) -> Weighting:
        """Return the weights of micro-batches.

        Terms are counted on the host if the batch is kept there, so that nothing waits for the device.
        """
        rule = self._policy.splits.loss_rule
        on_host = self.check.batch_on_host(batch) if rule.reads_a_field else None
        if on_host is not None:
            micro_batches = self.splitter.micro_batches(on_host, rows)
        return Weighting(rule, micro_batches, rows)

    def _require_weights(self, used: Weighting, weighting: Callable[[], Weighting], rule: str, passes: Passes) -> None:
        """Require that the loss rule gives a batch the weights that it was split with, applied in the same way.

        Args:
            used: These weights.
            weighting: Returns the weights that the present rule gives.
            rule: The name of the rule that gave `used`.
            passes: How its passes ran.

        Raises:
            ReweightedError: If the rules give other weights, and this process may repeat the batch.
            SplitError: If they do, and it may not.
        """
        name, repeats = (
            self._policy.splits.loss_rule.name,
            self._group.has_whole_parameters and self._policy.options.recover,
        )
        if self._policy.splits.passes != passes:
            if repeats:
                raise ReweightedError
            raise SplitError(_OTHER_PASSES)
        if name == rule:
            return
        if used.differs(weighting()):
            if repeats:
                raise ReweightedError
            raise SplitError(
                f"the micro-batches of this batch were weighted by {rule}, and a check of it found {name}. Declare "
                "MicroBatchRules(loss_weight=…), the number of terms that the loss is a mean over."
            )

    def _require_exact(
        self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, *, batch_idx: int, is_whole: bool = False
    ) -> None:
        """Find the batch's loss weights and merge rules; raise `SplitError` if no rule is exact."""
        if self._is_checked:
            own = self._request(kwargs, shape, is_whole=is_whole)
            self._policy.splits.record(self.check.verdict(own, batch_idx=batch_idx))

    def _request(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, *, is_whole: bool = False) -> Request:
        sizes = self._policy.sizes
        return Request(
            kwargs=kwargs,
            rows=shape.rows,
            unit=sizes.unit,
            micro_batch_size=sizes.micro_batch_size(shape),
            allows_batch_norm=is_whole or self._policy.splits.accepts_batch_norm,
        )

    def _learn_more(
        self,
        kwargs: "OrderedDict[str, Any]",
        shape: BatchShape,
        table: MergeTable,
        paths: Sequence[str],
        decides: Callable[[str], bool],
    ) -> None:
        """Check a batch whose step gave values whose merge the rules of `table` do not tell, before its update.

        Without such paths, another process of the group may have some.
        """
        if self._is_checked:
            self._policy.splits.record(self.check.learn_more(self._request(kwargs, shape), table, paths, decides))

    def _see_graph(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, graph: GraphFact | None) -> None:
        """Check a batch whose loss was computed in a new way, before its update."""
        self._policy.splits.record(self.check.see_graph(self._request(kwargs, shape), graph))

    def _see_bends(
        self, kwargs: "OrderedDict[str, Any]", shape: BatchShape, rows: Sequence[int], bends: LossBends
    ) -> None:
        """Check a batch whose micro-batches lie on other sides of the loss's bends, before its update."""
        self._policy.splits.record(self.check.see_bends(self._request(kwargs, shape), bends, rows))

    @property
    def counted_by(self) -> str:
        """The name of the rule by which `loss_terms` counts."""
        return "loss_weight" if self._rules.loss_weight is not None else self._policy.splits.loss_rule.name

    def loss_terms(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None, *, batch_idx: int) -> float:
        """Return the number of loss terms of a batch, for the mean over a window's terms.

        Raises:
            ConfigurationError: If the loss is a sum and the rules do not count its terms.
        """
        rules, batch = self._rules, next(iter(kwargs.values()))
        is_declared = rules.loss_weight is not None
        if rules.loss_is_sum and not is_declared:
            raise ConfigurationError(
                f'window_mean="terms" needs the number of loss terms of a batch, and the rules of {type(self._trainer.lightning_module).__name__} '
                '(loss_is_sum=True) do not say it: give loss_weight as well, or leave window_mean="batches".'
            )
        if self._is_checked and self._encoders is None and rules.splittable and not is_declared:
            self._find_rule(kwargs, shape, batch_idx=batch_idx)
        if shape is None and not is_declared:
            return 1.0
        if self._policy.splits.loss_rule.summands and not is_declared:
            raise ConfigurationError(
                f'window_mean="terms" needs the number of loss terms of a batch, and the loss of {type(self._trainer.lightning_module).__name__} is a sum of '
                'means over different terms: give loss_weight and loss_is_sum=True, or leave window_mean="batches".'
            )
        rows = 1 if shape is None else shape.rows
        rule = replace(self._policy.splits.loss_rule, adds=False)
        return Weighting(rule, [batch], [rows], zero_by_rows=False).terms

    def _find_rule(self, kwargs: "OrderedDict[str, Any]", shape: BatchShape | None, *, batch_idx: int) -> None:
        """Find the loss rule of a batch that may run whole; a batch without two units says nothing of it."""
        batch, least = next(iter(kwargs.values())), 2 * self._policy.sizes.unit
        if shape is not None and shape.rows >= least and self.splitter.refusal(batch, shape.rows) is None:
            self._require_exact(kwargs, shape, batch_idx=batch_idx, is_whole=True)
            return
        found = self.check.attend(Request(kwargs=kwargs, rows=1, unit=1, micro_batch_size=1))
        if found is not None:
            self._policy.splits.record(found)


def _then(call: Callable[..., None], follow: Callable[[], None]) -> Callable[..., None]:
    def both(*args: Any) -> None:
        call(*args)
        follow()

    return both


def _moves_by_hook(trainer: L.Trainer) -> bool:
    """Return whether module or data module has its own hook around the transfer of a batch."""
    owners = [owner for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)) if owner is not None]
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    return any(is_overridden(hook, owner) for hook in hooks for owner in owners)
