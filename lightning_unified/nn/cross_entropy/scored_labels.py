"""The labels of a loss in its graph, for readers of autograd's nodes.

Autograd's node of `torch.nn.functional.cross_entropy` keeps the labels, the label that is ignored and the class weights. Losses in chunks are
other nodes, so they add one that keeps the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["ScoredLabels", "scored_labels_of", "with_labels"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredLabels:
    """The labels of a loss, and how they are scored.

    Args:
        labels: The labels, integers of any shape.
        ignore_index: The label that is not scored.
        weight: The class weights (V); None without any.
    """

    labels: Tensor
    ignore_index: int
    weight: Tensor | None = None


def with_labels(loss: Tensor, labels: ScoredLabels) -> Tensor:
    """Return `loss`, with a node in its graph that keeps the labels until the backward pass."""
    return _Labels.apply(loss, labels)  # pyright: ignore[reportReturnType]


def scored_labels_of(node: Any) -> ScoredLabels | None:
    """Return the labels that a node of `with_labels` keeps; None for other nodes."""
    found = getattr(node, "scored_labels", None)
    return found if isinstance(found, ScoredLabels) else None


class _Labels(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        loss, ctx.scored_labels = args
        return loss.view_as(loss)

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.scored_labels = None
        return grad_outputs[0], None
