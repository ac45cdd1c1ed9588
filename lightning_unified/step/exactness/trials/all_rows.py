"""Compare the loss of a whole batch with that of its micro-batches, without gradients.

A trial compares the gradients of some rows. A loss may compute with a fixed number of rows, such as the 32 hardest of a batch, and then differ
only where the batch has more.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.gradients import Tolerance
from lightning_unified.step.exactness.losses import LossRule, Weighting
from lightning_unified.step.exactness.trials.run import Runner

__all__ = ["rules_of_all_rows"]

_CANCELLED = 64  # rounding steps of 1 in a mean over rows whose terms cancel; judgement


def rules_of_all_rows(
    runner: Runner,
    kwargs: "OrderedDict[str, Any]",
    micro_batches: Sequence[Any],
    sizes: Sequence[int],
    rules: Sequence[LossRule],
) -> list[LossRule]:
    """Return the loss rules under which the micro-batches' losses give that of the whole batch.

    Losses that are not finite, or missing, say nothing: then all rules are returned.

    Args:
        runner: Runs the step and undoes it.
        kwargs: The arguments of `training_step`, the batch first.
        micro_batches: The micro-batches, of all rows of the batch.
        sizes: The rows of each micro-batch.
        rules: The rules to try.

    Raises:
        SplitError: If no rule does.
    """
    whole = runner.loss(kwargs, next(iter(kwargs.values())))
    losses = [runner.loss(kwargs, one) for one in micro_batches]
    parts = [one for one in losses if one is not None]
    if whole is None or len(parts) < len(losses) or not torch.stack([whole, *parts]).isfinite().all():
        return list(rules)
    formats = {whole.dtype, *(one.dtype for one in runner.module.parameters() if one.is_floating_point())}
    allowed = Tolerance.of(formats).relative
    merged = {rule.name: _merged(Weighting(rule, micro_batches, sizes), losses) for rule in rules}
    agreeing = [rule for rule in rules if _agree(merged[rule.name], whole, parts, allowed)]
    if not agreeing:
        found = ", ".join(f"{name}: {float(value):.6g}" for name, value in merged.items() if value is not None)
        raise SplitError(
            f"{type(runner.module).__name__} cannot be split exactly: the loss of a batch of {sum(sizes)} rows is {float(whole):.6g}, and that of its "
            f"micro-batches is another ({found}), although fewer rows agreed. Its loss depends on the number of rows. Declare "
            "MicroBatchRules(splittable=False) to run batches whole, or check=False to split all the same.",
            is_for_rules=True,
        )
    return agreeing


def _merged(weighting: Weighting, losses: Sequence[Tensor | None]) -> Tensor | None:
    """Return the whole batch's loss; as in training, micro-batches without a loss term have none."""
    return weighting.loss([None if weighting.share(index) == 0 else loss for index, loss in enumerate(losses)])


def _agree(merged: Tensor | None, whole: Tensor, parts: Sequence[Tensor], allowed: float) -> bool:
    """Return whether a loss is that of the whole batch up to rounding of the largest of its parts.

    Terms of order 1 that cancel, such as those of normalized advantages, leave nothing but their rounding.
    """
    largest = max(abs(float(one)) for one in (whole, *parts))
    rounding = min(_CANCELLED * torch.finfo(whole.dtype).eps, 1e-2)
    return merged is not None and abs(float(merged) - float(whole)) <= max(allowed * largest, rounding)
