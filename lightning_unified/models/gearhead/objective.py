"""GearHead's loss: cross-entropy of the next token, plus a weighted one of the subsystem.

Both are sums divided by the whole batch's numbers of terms, so that losses and gradients of micro-batches add up.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_unified.models.gearhead.network import GearHeadNetwork
from lightning_unified.nn.linear_cross_entropy import IGNORED

__all__ = ["loss_sums", "mean_loss", "with_totals"]


def with_totals(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with its numbers of loss terms `scored_tokens` and `scored_diagnoses`.

    Both are scalars.
    """
    diagnoses = batch.get("diagnosis_labels")
    asked = torch.zeros((), dtype=torch.int64, device=batch["labels"].device)
    if diagnoses is not None:
        asked = (diagnoses != IGNORED).sum()
    return {**batch, "scored_tokens": (batch["labels"][:, 1:] != IGNORED).sum(), "scored_diagnoses": asked}


def loss_sums(
    network: GearHeadNetwork, batch: Mapping[str, Tensor], *, chunk_rows: int | None = None
) -> dict[str, Tensor]:
    """Return the network's scalars `loss`, `diagnosis_loss` and `right` for a batch.

    `chunk_rows` is the number of tokens of a chunk of the loss; None chooses.
    """
    return network(
        batch["input_ids"],
        batch.get("error_code_ids"),
        labels=batch["labels"],
        diagnosis_labels=batch.get("diagnosis_labels"),
        chunk_rows=chunk_rows,
    )


def mean_loss(
    network: GearHeadNetwork, batch: Mapping[str, Tensor], *, diagnosis_weight: float, chunk_rows: int | None = None
) -> Tensor:
    """Return the loss of some rows of a batch `with_totals`: their share of the batch's loss."""
    sums = loss_sums(network, batch, chunk_rows=chunk_rows)
    loss = sums["loss"] / batch["scored_tokens"].clamp(min=1)
    if network.diagnostic_head is None:
        return loss
    return loss + diagnosis_weight * (sums["diagnosis_loss"] / batch["scored_diagnoses"].clamp(min=1))
