"""The LightningModule that all planner benchmarks train.

It holds a network, a loss over a batch of named tensors, and a choice of optimizers.
"""

import lightning as L
import torch
from torch import Tensor, nn

__all__ = ["OPTIMIZERS", "Learner", "make_optimizer"]

OPTIMIZERS = ("adamw fused", "adamw foreach", "sgd momentum")


def make_optimizer(parameters, name: str) -> torch.optim.Optimizer:
    """Return the optimizer called `name` over those of `parameters` that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kind, _, how = name.partition(" ")
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-4, **{how: True})


class Learner(L.LightningModule):
    """Trains `net`, whose forward takes the batch's tensors by name and gives a loss.

    Args:
        net: What is trained.
        optimizer: One of `OPTIMIZERS`.
    """

    def __init__(self, net: nn.Module, *, optimizer: str = OPTIMIZERS[0]) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        loss = self.net(**batch)
        self.log("train/loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.optimizer)
