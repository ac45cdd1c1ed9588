"""Cross-entropy with class weights and label smoothing."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

__all__ = ["IGNORED", "ClassificationLoss", "class_weights"]

IGNORED = -100  # label of a row that is not scored, as in torch


def class_weights(given: str | Sequence[float], *, labels: int, counts: Sequence[int] | None) -> Tensor | None:
    """Return one weight for each class (C), or None for equal ones.

    Args:
        given: "none"; "balanced", N / (C · N_c), so that each class has the same total weight; or the weights.
        labels: Number of classes, C.
        counts: Training rows of each class, N_c.

    Raises:
        ValueError: If a class lacks a positive weight, or classes cannot be balanced.

    Source: King and Zeng 2001, "Logistic Regression in Rare Events Data", section 4.2.
    """
    if given == "none":
        return None
    if given == "balanced":
        if counts is None:
            raise ValueError(
                "class_weights=balanced needs the number of training rows of each class, and the data does not say "
                "(class_counts); give the weights as a list."
            )
        if min(counts) < 1:
            raise ValueError(
                f"class_weights=balanced, and class {list(counts).index(min(counts))} has no training row; give the weights as a list."
            )
        return torch.tensor([sum(counts) / (len(counts) * count) for count in counts])
    weights = [float(weight) for weight in given]
    if len(weights) != labels or min(weights) < 0 or not any(weights):
        raise ValueError(
            f"class_weights={weights}: give {labels} weights, one a label, none below 0; or none, or balanced."
        )
    return torch.tensor(weights)


class ClassificationLoss(nn.Module):
    """Weighted cross-entropy of some rows, as their share of the batch's loss.

    All shares add up to torch's mean.

    Args:
        smoothing: Share of a label's weight that is spread over all classes.
        weights: One weight for each class (C); None for equal ones.
    """

    weights: Tensor | None

    def __init__(self, *, smoothing: float, weights: Tensor | None) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", weights, persistent=False)

    def total_weight(self, labels: Tensor) -> Tensor:
        """Return the summed class weights (a scalar) of the scored rows (B).

        Equal weights give the number of scored rows.
        """
        scored = labels != IGNORED
        if self.weights is None:
            return scored.sum()
        return (self.weights[labels.clamp(min=0)] * scored).sum()

    @override
    def forward(self, logits: Tensor, labels: Tensor, *, total: Tensor) -> Tensor:
        """Return the rows' share of the loss.

        Shapes:
            logits (B, C), labels (B), -100 where a row is not scored; total, the whole batch's `total_weight`.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        own = None if self.weights is None else self.weights.to(scores.dtype)
        summed = functional.cross_entropy(scores, labels, weight=own, label_smoothing=self.smoothing, reduction="sum")
        return summed / total.clamp(min=torch.finfo(scores.dtype).tiny)
