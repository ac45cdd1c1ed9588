"""Loss of rewarded completions: scores of policy and reference, and the objective."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.models.grpo.batches.collector import KeptBatch
from lightning_unified.models.grpo.objective import Objective, Terms
from lightning_unified.models.grpo.reference import Reference

__all__ = ["SHARES", "completion_loss"]

SHARES = ("train/entropy", "train/clipped", "train/sampling_gap", "train/kl")
"""Names of the values to log: a micro-batch's shares of the batch's means.

Some of them consist of rounding only.
"""


def completion_loss(
    policy: nn.Module,
    batch: Mapping[str, Any],
    score: Callable[[], tuple[Tensor, Tensor]],
    *,
    objective: Objective,
    reference: Reference,
    kept: KeptBatch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of rows of a batch, and values to log by name.

    Each is a share of the whole batch's mean. In a batch's first iteration, the policy is the one that sampled, and `kept` stores its
    log-probabilities for later iterations. The reference is used if the objective's `beta` is above 0. `score` returns the
    log-probabilities and entropies (R, T) of these rows under the weights that `policy` has when it is called.
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
    """Return the values to log; `sampling_gap` compares the sampler's log-probabilities."""
    mask, total = batch["mask"], max(batch["total"], 1)
    gap = (old - batch["sampled_log_probs"]).abs()
    shares = {
        "train/entropy": (entropy * mask).sum() / total,
        "train/clipped": terms.clipped,
        "train/sampling_gap": (gap * mask).sum() / total,
    }
    return shares if terms.kl is None else {**shares, "train/kl": terms.kl}
