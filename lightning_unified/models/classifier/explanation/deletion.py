"""Deletion test: mask words one after the other and measure the label's probability.

An order that names the important words first makes the probability fall fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_unified.models.classifier.module import TextClassifier

__all__ = ["Deletion", "delete_in_order"]

_STAGES = 20  # stages at which the probability is computed, at most
_ROWS = 64  # texts of a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """Effect of deleting words in an order, compared with random orders.

    Attributes:
        area: Mean of 1 - p / p0 over the stages of deletion: the higher, the earlier the probability falls. Below 0 it rises.
        random_mean: Mean of that area over random orders.
        random_deviation: Standard deviation over random orders.
        orders: Number of random orders.
        p_value: Share of all orders, the given one included, with at least the given one's area.
    """

    area: float
    random_mean: float
    random_deviation: float
    orders: int
    p_value: float


@torch.no_grad()
def delete_in_order(
    module: TextClassifier,
    ids: Tensor,
    groups: Sequence[Sequence[int]],
    *,
    order: Sequence[int],
    target: int,
    masked: int,
    orders: int,
    seed: int,
) -> Deletion:
    """Mask words in `order` and in random orders, and compare the fall of a label's probability.

    Args:
        module: In eval mode.
        ids: One text (T), without pads.
        groups: The places of each word's tokens.
        order: The words in the order in which they are masked.
        target: The label's number.
        masked: The id that replaces a masked token.
        orders: Number of random orders.
        seed: Seed of the random orders.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(len(groups), generator=generator).tolist() for _ in range(orders)]
    stages = _stages(len(groups))
    rows = [ids.cpu()]
    for one in (list(order), *drawn):
        row = ids.cpu().clone()
        for done, stop in zip([0, *stages], stages, strict=False):
            row[[place for word in one[done:stop] for place in groups[word]]] = masked
            rows.append(row.clone())
    shares = torch.cat(
        [
            module.probabilities(module(torch.stack(rows[start : start + _ROWS]).to(module.device)))[:, target].cpu()
            for start in range(0, len(rows), _ROWS)
        ]
    ).double()
    areas = (1 - shares[1:] / shares[0].clamp(min=1e-12)).view(1 + orders, len(stages)).mean(1)
    own, others = float(areas[0]), areas[1:]
    return Deletion(
        area=own,
        random_mean=float(others.mean()),
        random_deviation=float(others.std()) if orders > 1 else 0.0,
        orders=orders,
        p_value=(1 + int((others >= own - 1e-9).sum())) / (1 + orders),
    )


def _stages(words: int) -> list[int]:
    """Return the numbers of masked words to measure the probability at; the last is all words."""
    count = min(words, _STAGES)
    return [round(words * (index + 1) / count) for index in range(count)]
