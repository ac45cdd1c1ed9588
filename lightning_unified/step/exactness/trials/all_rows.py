"""Compare a whole batch's loss and results with its micro-batches', without gradients.

A trial compares the gradients of some rows. A loss may compute with a fixed number of rows, such as the 32 hardest of a batch, and then differ
only where the batch has more. Rows that a log or a buffer combines may lie far apart.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.gradients import Tolerance
from lightning_unified.step.exactness.losses import LossRule, Weighting
from lightning_unified.step.exactness.losses.summands import Summand, keys_by_terms
from lightning_unified.step.exactness.tables import Tables, owner_of
from lightning_unified.step.exactness.trials.learning import (
    entries_by_rows,
    learn_results,
    without_varying,
)
from lightning_unified.step.exactness.trials.refusals import refusal_of_state
from lightning_unified.step.exactness.trials.results import Results
from lightning_unified.step.exactness.trials.run import Runner
from lightning_unified.step.results.merging import MicroBatchWeights

__all__ = ["AllRows"]

_CANCELLED = 64  # rounding steps of 1 in a mean over rows whose terms cancel; judgement


class AllRows:
    """A whole batch and its micro-batches, which run without gradients.

    Args:
        runner: Runs the step and undoes it.
        tables: The merge rules of results, which the comparison extends.
        kwargs: The arguments of `training_step`, the batch first.
        micro_batches: The micro-batches, of all rows of the batch.
        sizes: The rows of each micro-batch.
    """

    def __init__(
        self,
        runner: Runner,
        tables: Tables,
        kwargs: "OrderedDict[str, Any]",
        *,
        micro_batches: Sequence[Any],
        sizes: Sequence[int],
    ) -> None:
        self._runner, self._tables, self._kwargs = runner, tables, kwargs
        self._micro_batches, self._sizes = micro_batches, sizes

    def compare(self, rules: Sequence[LossRule]) -> list[LossRule]:
        """Return the loss rules that give the whole batch's loss, and learn how results merge.

        Losses that are not finite, or missing, say nothing: then all rules are returned.

        Args:
            rules: The rules to try.

        Raises:
            SplitError: If no rule does, or the micro-batches write other state than the whole batch.
        """
        whole, results = self._whole()
        by_summand = any(rule.summands for rule in rules)
        runs = [
            self._runner.without_gradients(self._kwargs, one, reads_summands=by_summand) for one in self._micro_batches
        ]
        losses = [loss for loss, _, _ in runs]
        parts = [one for one in losses if one is not None]
        if whole is None or len(parts) < len(losses) or not torch.stack([whole, *parts]).isfinite().all():
            return list(rules)
        formats = {
            whole.dtype,
            *(one.dtype for one in self._runner.module.parameters() if one.is_floating_point()),
        }
        allowed = Tolerance.of(formats).relative
        variants = {rule.name: rule.variants() for rule in rules}
        tried = [one for own in variants.values() for one in own]
        weightings = {rule.name: Weighting(rule, self._micro_batches, self._sizes) for rule in tried}
        for weighting in weightings.values():
            _note_summands(weighting, [summands for _, _, summands in runs])
        merged = {name: _merged(weighting, losses) for name, weighting in weightings.items()}
        fitting = [rule for rule in tried if _agree(merged[rule.name], whole, parts, allowed)]
        if not fitting:
            raise self._refusal(whole, merged)
        agreeing = [
            rule.narrowed(own) for rule in rules if (own := [one for one in variants[rule.name] if one in fitting])
        ]
        if not self._runner.draws_in_eval:
            self._learn(
                results, [one for _, one, _ in runs], weightings[fitting[0].name].weights_of_results, tolerance=allowed
            )
        return agreeing

    def _whole(self) -> tuple[Tensor | None, Results]:
        loss, results, _ = self._runner.without_gradients(self._kwargs, next(iter(self._kwargs.values())))
        return loss, results

    def _learn(self, whole: Results, runs: Sequence[Results], weights: MicroBatchWeights, *, tolerance: float) -> None:
        """Learn how results merge; refuse written state that no rule merges.

        State that also differs between two equal runs is not refused.
        """
        troubles = learn_results(self._tables, whole, runs, weights, tolerance=tolerance)
        sized = entries_by_rows([whole, *runs], [sum(weights.rows), *weights.rows])
        troubles = [path for path in troubles if path not in sized or owner_of(path) not in self._tables.sized]
        if self._runner.anywhere(bool(troubles)):
            again = self._whole()[1].written
            troubles = without_varying(self._tables, troubles, whole.written, again)
        if troubles:
            raise SplitError(refusal_of_state(type(self._runner.module).__name__, troubles))

    def _refusal(self, whole: Tensor, merged: dict[str, Tensor | None]) -> SplitError:
        found = ", ".join(f"{name}: {float(value):.6g}" for name, value in merged.items() if value is not None)
        return SplitError(
            f"{type(self._runner.module).__name__} cannot be split exactly: the loss of a batch of {sum(self._sizes)} rows is {float(whole):.6g}, and that of its "
            f"micro-batches is another ({found}), although fewer rows agreed. Its loss depends on the number of rows. Declare "
            "MicroBatchRules(splittable=False) to run batches whole, or check=False to split all the same.",
            is_for_rules=True,
        )


def _merged(weighting: Weighting, losses: Sequence[Tensor | None]) -> Tensor | None:
    """Return the whole batch's loss; as in training, micro-batches without a loss term have none."""
    if weighting.summands:
        weights = weighting.weights_of_results
        return torch.tensor(weights.loss, dtype=torch.float64) if weights.losses else None
    return weighting.loss([None if weighting.share(index) == 0 else loss for index, loss in enumerate(losses)])


def _note_summands(weighting: Weighting, runs: Sequence[Sequence[Summand]]) -> None:
    """Note the summands of all micro-batches in a weighting by summands, if it has factors for them."""
    if not weighting.summands or not all(runs):
        return
    zeros = [{one.key for one in run if one.is_zero} for run in runs]
    keys = [
        keys_by_terms([one.key for one in run], weighting.needed(index), zeros[index]) for index, run in enumerate(runs)
    ]
    if None in keys:
        return
    for index, (own, run) in enumerate(zip(keys, runs, strict=True)):
        pairs = zip(own or (), run, strict=True)
        weighting.note(index, {key: one.value for key, one in pairs if one.value is not None})


def _agree(merged: Tensor | None, whole: Tensor, parts: Sequence[Tensor], allowed: float) -> bool:
    """Return whether a loss is that of the whole batch up to rounding of the largest of its parts.

    Terms of order 1 that cancel, such as those of normalized advantages, leave nothing but their rounding.
    """
    largest = max(abs(float(one)) for one in (whole, *parts))
    rounding = min(_CANCELLED * torch.finfo(whole.dtype).eps, 1e-2)
    return merged is not None and abs(float(merged) - float(whole)) <= max(allowed * largest, rounding)
