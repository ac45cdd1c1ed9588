"""The labels of a cross-entropy and their weights, read from autograd's nodes."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from lightning_unified.nn.cross_entropy.scored_labels import ScoredLabels, scored_labels_of

__all__ = [
    "NUMBER",
    "WEIGHED",
    "Scoring",
    "figures_of_labels",
    "labels_of",
    "saved",
    "scorings",
]

NUMBER = " by a number"
WEIGHED = " weighed by class"
_CLASSES = 4096  # judgement: a checkpoint keeps the weights of so many classes
_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a cross-entropy scores labels.

    Args:
        ignore_index: The label that is not scored.
        weights: The weight of each class, if the loss is divided by the sum of the labels' weights; empty for none, and for thousands of classes.
    """

    ignore_index: int
    weights: tuple[float, ...] = ()


def labels_of(node: Any) -> ScoredLabels | None:
    """Return the labels of a cross-entropy; None for other nodes, and where they would be computed again."""
    if node.name() not in _LABELS:
        return scored_labels_of(node)
    labels, ignored, weight = saved(node, "target"), saved(node, "ignore_index"), saved(node, "weight")
    if not isinstance(labels, Tensor):
        return None
    ignored -= 1 << 64 if ignored >> 63 else 0  # autograd's nodes return -100 as an unsigned integer
    return ScoredLabels(labels=labels, ignore_index=ignored, weight=weight if isinstance(weight, Tensor) else None)


def scorings(nodes: Iterable[Any]) -> set[Scoring]:
    """Return how the cross-entropies among autograd's nodes score labels."""
    found: set[Scoring] = set()
    for node in nodes:
        with suppress(RuntimeError):  # the labels were written in place
            if (labels := labels_of(node)) is not None:
                weight = labels.weight
                weights = () if weight is None or weight.numel() > _CLASSES else tuple(weight.tolist())
                found.add(Scoring(labels.ignore_index, weights))
    return found


def figures_of_labels(found: ScoredLabels) -> Iterator[tuple[str, Tensor]]:
    """Yield on which sides labels lie, scored or ignored, and figures of the class weights of the scored ones."""
    labels, weight = found.labels, found.weight
    if not labels.numel():
        return
    scored = labels != found.ignore_index
    yield "with labels that are ignored", torch.stack((scored.all(), scored.any())).float()
    if weight is not None:
        weight = weight.detach().float()
        weights = weight[labels.clamp(min=0, max=len(weight) - 1)]
        total = weights.masked_fill(~scored, 0).sum()
        yield f"with class weights{NUMBER}", (total / scored.sum().clamp(min=1)).reshape(1).expand(2)
        extremes = weights.masked_fill(~scored, inf).min(), weights.masked_fill(~scored, -inf).max()
        yield f"with extreme class weights{NUMBER}", torch.stack(extremes)
        places = torch.arange(1, len(weight) + 1, device=weight.device, dtype=torch.float32).sqrt()
        yield f"of labels{WEIGHED}", torch.stack((total, (weight * places).sum()))


def saved(node: Any, name: str) -> Any:
    """Return a value that a node keeps for its backward pass; None where a hook would compute it again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if not isinstance(raw, tuple) and raw is not None and getattr(raw, "unpack_hook", raw) is not None:
        return None
    value = getattr(node, f"_saved_{name}", None)
    # a dispatch mode, such as a simulated machine's, gets a number in place of a tensor made of one, which `detach` refuses
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
