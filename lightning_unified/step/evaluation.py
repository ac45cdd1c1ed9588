"""Validation, test and predict steps: whole, or split after memory ran out in one."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from lightning_unified.step.encoders import Encoders, encoders_of
from lightning_unified.step.exactness.evaluation import EvaluationCheck
from lightning_unified.step.exactness.facts.decisions import BatchDecisions
from lightning_unified.step.exactness.group import CheckGroup, Request
from lightning_unified.step.exactness.losses import Weighting
from lightning_unified.step.loop.planner import StepPlanner
from lightning_unified.step.loop.split_results import SplitResults
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.policy.memory_policy import STAGES
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.measured_room import MeasuredRoom
from lightning_unified.step.recovery.oom import caught
from lightning_unified.step.recovery.snapshot import StepSnapshot
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights
from lightning_unified.step.split import BatchShape
from lightning_unified.step.undo import EVALUATION_STEPS, StateWatch, roots_of

__all__ = ["EvaluationSteps"]


class EvaluationSteps:
    """Runs evaluation steps so that their logs and outputs are those of the whole batch.

    Before the first split batch of a stage, a check finds how micro-batches' results merge; see `exactness.evaluation`.
    Predictions whose merging is uncertain are refused.

    Without a `planner` nothing is predicted.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, planner: StepPlanner | None = None) -> None:
        self._trainer, self._policy, self._planner = trainer, policy, planner
        self._group = CheckGroup()
        self._module = trainer.lightning_module
        self._checks: dict[tuple[str, int], EvaluationCheck] = {}
        self._encoders: dict[str, Encoders | None] = {}
        self._state = StateWatch(partial(roots_of, self._module, trainer, EVALUATION_STEPS))
        self._written = StateWatch(partial(roots_of, self._module, trainer, EVALUATION_STEPS))
        self._generators = GeneratorWatch(trainer.strategy.root_device)

    def run(self, step: Callable[..., Any], *args: Any, phase: str) -> Any:
        """Return the whole batch's output of `step(*args)`.

        Args:
            step: The strategy's `validation_step`, `test_step` or `predict_step`.
            *args: Its arguments, the batch first.
            phase: `"validation"`, `"test"` or `"predict"`.

        Raises:
            OutOfMemoryError: If the smallest micro-batch does not fit.
        """
        batch, *rest = args
        shape = self._shape(batch, rest, phase=phase)
        if self._planner is not None and phase == "validation":
            self._planner.look_at_validation(batch, shape)
        if not self._policy.options.recover:
            self._state.look()
            return self._attempt(step, batch, rest, shape=shape, phase=phase)
        attempt = 0
        while True:
            snapshot = self._snapshot(batch)
            output, reason = caught(partial(self._attempt, step, batch, rest, shape=shape, phase=phase))
            if reason is None:
                if shape is not None:
                    self._policy.evaluation_sizes.worked(shape)
                self._state.learn(snapshot.state)
                return output
            attempt += 1
            batch = snapshot.undo()
            del snapshot
            shape = self._shape(batch, rest, phase=phase, is_needed=True)
            self._policy.out_of_memory(phase=phase, reason=reason, shape=shape, attempt=attempt, batch=batch)

    def _snapshot(self, batch: Any) -> StepSnapshot:
        results = self._trainer._results
        return StepSnapshot(self._trainer, state=self._state, generators=self._generators, results=results, batch=batch)

    def _attempt(
        self, step: Callable[..., Any], batch: Any, rest: list[Any], *, shape: BatchShape | None, phase: str
    ) -> Any:
        if shape is None or len(sizes := self._policy.evaluation_sizes.micro_batches(shape)) == 1:
            return step(batch, *rest)
        if not self._policy.batches.of(STAGES[phase]).splittable:
            return step(batch, *rest)
        if (encoders := self._encoders_of(phase)) is not None:
            return encoders.run(partial(step, batch, *rest), rows=max(sizes))
        check = self._check(phase, _loader_of(rest))
        whole, decided = check.decisions.watched(lambda one: step(one, *rest)), BatchDecisions(check.decisions)
        splitter, checks = self._policy.batches.splitter(STAGES[phase]), self._policy.batches.checks(STAGES[phase])
        own, likely = self._request(batch, shape), self._policy.splits.loss_rule
        # few rows may be alike where others are not
        of_all = replace(own, micro_batch_size=own.rows, micro_batches=own.sizes)
        learn = partial(check.learn, whole, of_all, likely=likely)
        if checks:
            check.look(whole, own, likely=likely, now=(self._trainer.current_epoch, rest[0] if rest else 0))
            if check.compared < own.rows:
                self._policy.notices.say_few_compared(check.compared, phase=phase)
            self._policy.notices.say_unmergeable(check.unmergeable(), phase=phase)
            self._policy.notices.say_varying(check.tables.varying, phase=phase)
            self._policy.notices.say_drawn_state(check.tables.written.drawn, phase=phase)
            if splitter.trims:
                self._policy.notices.say_trimmed(phase=phase)
            if check.draws:
                self._policy.notices.say_drawn(check.logged, phase=phase)
            if check.leaves_gradients:
                self._policy.notices.say_per_micro_batch(
                    f"the backward pass of {phase}_step runs",
                    "The gradients that it leaves add up those of micro-batches. Take them from torch.autograd.grad(...), and log or return them.",
                )
        micro_batches = splitter.micro_batches(batch, sizes, loader=_loader_of(rest))
        results = SplitResults(
            check.tables,
            results=self._trainer._results,
            metrics=self._state.named_metrics,
            state=self._written if checks else None,
            ignored=(),
            learn=partial(self._learn_more, check, learn, phase),
        )
        outputs = []
        for index, micro_batch in enumerate(micro_batches):
            with results.micro_batch(index):
                outputs.append(decided.run(index, partial(step, micro_batch, *rest)))
            results.end_micro_batch()

        def weights() -> MicroBatchWeights:
            return self._weights(check, micro_batches, sizes)

        def undecided() -> set[str]:
            return check.left(check.undecided(micro_batches, sizes) | results.undecided(weights()))

        if checks:
            with results.state_before():
                check.see_decisions(whole, of_all, likely=likely, facts=decided.facts([(size, size) for size in sizes]))
            new = undecided()
            if learn(is_due=lambda: bool(new)):
                new = undecided()
            if new:
                check.ambiguous |= new
                self._policy.notices.say_ambiguous(new, phase=phase)
        if phase == "predict":
            if checks:
                learn(is_due=lambda: bool(check.guesses(outputs, weights())))
            check.refuse_guesses(outputs, weights())
        whole_result = results.finish(outputs, weights())
        if phase == "predict":
            check.refuse_guesses(outputs, weights())  # a rule may not apply to these values
        return whole_result

    def _learn_more(
        self,
        check: EvaluationCheck,
        learn: Callable[..., bool],
        phase: str,
        table: MergeTable,
        paths: Sequence[str],
        decides: Callable[[str], bool],
    ) -> None:
        """Check a batch if its step gave values at `paths` for which the rules of `table` do not decide.

        Note those that no rule merges.
        """
        if self._policy.batches.checks(STAGES[phase]):
            learn(is_due=lambda: bool(paths))
            for path in paths:
                if not decides(path):
                    table.reject(path)
        self._policy.notices.say_unmergeable(check.unmergeable(), phase=phase)

    def _encoders_of(self, phase: str) -> Encoders | None:
        if phase not in self._encoders:
            self._encoders[phase] = encoders_of(self._trainer, self._policy, STAGES[phase])
        return self._encoders[phase]

    def _request(self, batch: Any, shape: BatchShape) -> Request:
        sizes = self._policy.evaluation_sizes
        size = sizes.micro_batch_size(shape)
        known = sizes.evidence.bounds(shape.elements)
        return Request(
            kwargs=OrderedDict(batch=batch),
            rows=shape.rows,
            unit=sizes.unit,
            micro_batch_size=size,
            failed=None if known is None else known[1],
        )

    def _check(self, phase: str, loader: int) -> EvaluationCheck:
        """Return the check of a phase and data loader."""
        key = (phase, loader)
        if key not in self._checks:
            self._checks[key] = EvaluationCheck(
                self._trainer,
                rules=self._policy.batches.of(STAGES[phase]),
                splitter=self._policy.batches.splitter(STAGES[phase]),
                loader=loader,
                phase=phase,
                room=MeasuredRoom(self._policy.watch, self._module, self._trainer.strategy.root_device),
                group=self._group,
            )
        return self._checks[key]

    def _weights(self, check: EvaluationCheck, micro_batches: list[Any], sizes: list[int]) -> MicroBatchWeights:
        rows = MicroBatchWeights(sizes, list(map(float, sizes)))
        return rows if check.rule.count is None else Weighting(check.rule, micro_batches, sizes).weights

    def _shape(self, batch: Any, rest: list[Any], *, phase: str, is_needed: bool = False) -> BatchShape | None:
        """Return the shape of `batch`; None if it has none or none is needed.

        A rule that counts rows is called only if the batch may have to be split.
        """
        counts = self._policy.batches.of(STAGES[phase]).rows.count is not None
        if counts and not is_needed and self._policy.evaluation_sizes.runs_whole:
            return None
        return self._policy.batches.splitter(STAGES[phase]).shape(batch, loader=_loader_of(rest))


def _loader_of(rest: list[Any]) -> int:
    """Return the index of a batch's loader, 0 if there is only one.

    With several loaders, Lightning passes it after the batch's own index.
    """
    return rest[1] if len(rest) > 1 else 0
