"""Loss of rewarded completions: scores of policy and reference, and the objective, for rows of a prepared batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.grpo.batches.collector import KeptBatch
from lightning_unified.models.grpo.objective import Objective, Terms
from lightning_unified.models.grpo.reference import Reference

__all__ = ["completion_loss"]


def completion_loss(
    policy: nn.Module,
    batch: Mapping[str, Any],
    score: Callable[[], tuple[Tensor, Tensor]],
    *,
    objective: Objective,
    reference: Reference,
    kept: KeptBatch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of some rows of a batch, and values to log by name; each is a share of the whole batch's mean.

    In a batch's first iteration, the policy is the one that sampled, and its log-probabilities are stored for later iterations.

    Args:
        policy: The model, which also runs with the reference's weights.
        batch: Rows of a prepared batch with `advantages`.
        score: Returns the log-probabilities and entropies (R, T) of these rows under the policy's present weights.
        objective: The loss.
        reference: The reference policy; it is used if the objective's `beta` is above 0.
        kept: Stores and holds the first iteration's log-probabilities.
    """
    is_repeated, anchor = batch.get("iteration", 0) > 0, None
    if is_repeated:
        anchor = batch.get("reference")
    elif objective.beta:
        with torch.no_grad(), reference.on(policy):
            anchor = score()[0]
    log_probs, entropy = score()
    old = batch["old"] if is_repeated else log_probs.detach()
    terms = objective(
        log_probs,
        mask=batch["mask"],
        advantages=batch["advantages"],
        total=batch["total"],
        old=old,
        reference=anchor,
    )
    if "row" in batch and not is_repeated:
        kept.note(batch["row"], old=old, reference=anchor)
    return terms.loss, _shares(batch, terms, old=old, entropy=entropy)


def _shares(batch: Mapping[str, Any], terms: Terms, *, old: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Return the values to log; `sampling_gap` is the mean difference between the sampler's log-probabilities and `old`."""
    mask, total = batch["mask"], max(batch["total"], 1)
    gap = (old - batch["sampled_log_probs"]).abs()
    shares = {
        "train/entropy": (entropy * mask).sum() / total,
        "train/clipped": terms.clipped,
        "train/sampling_gap": (gap * mask).sum() / total,
    }
    return shares if terms.kl is None else {**shares, "train/kl": terms.kl}
