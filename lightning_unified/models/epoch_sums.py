"""Sums over all batches and processes of a validation epoch."""

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

__all__ = ["EpochSums"]


class EpochSums(Metric):
    """Metric that adds up a vector, exact for any split of batches over micro-batches and processes.

    Args:
        size: Size of the vector.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(size), dist_reduce_fx="sum")

    @override
    def update(self, sums: Tensor) -> None:
        """Add the sums (size) of one batch."""
        self.sums += sums

    @override
    def compute(self) -> Tensor:
        """Return the sums (size) over all batches and processes."""
        return self.sums
