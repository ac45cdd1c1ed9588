"""The backward pass of a batch that runs as micro-batches, for the strategies."""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.results.logs import inside_hook

__all__ = ["MicroBatchBackward"]


class MicroBatchBackward(Strategy):
    """Splits `Strategy.backward`: micro-batches' backward passes, then the hooks after them."""

    policy: MemoryPolicy

    def backward_micro_batch(self, loss: Tensor, optimizer: Optimizer, share: float | None) -> Tensor:
        """Run one micro-batch's backward pass, without the hooks that follow the batch's last.

        `on_before_backward` and `LightningModule.backward` get the micro-batch's own loss. If they log it, the mean of
        the logs is the batch's loss. The gradient is multiplied by the loss's `share` of the batch.
        """
        assert self.lightning_module is not None
        self.policy.caches.sample()
        self.pre_backward(loss)
        scaled = self.precision_plugin.pre_backward(loss, self.lightning_module)
        if share is not None:
            scaled = _Share.apply(scaled, share)
        with inside_hook(self.lightning_module, "backward"):
            self.precision_plugin.backward(scaled, self.lightning_module, optimizer)
        return scaled

    def after_backward(self, loss: Tensor) -> None:
        """Run the hooks after a batch's last backward pass, when its gradient is complete."""
        assert self.lightning_module is not None
        self.post_backward(self.precision_plugin.post_backward(loss, self.lightning_module))


class _Share(torch.autograd.Function):
    """The identity of a loss, whose gradient is multiplied by a share."""

    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.view_as(loss)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.share, None
