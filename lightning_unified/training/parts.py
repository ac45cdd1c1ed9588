"""The backward pass of a batch that runs in parts, as the strategies have it."""

from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_unified.training.policy import MemoryPolicy

__all__ = ["PartwiseBackward"]


class PartwiseBackward(Strategy):
    """Runs `Strategy.backward` (Lightning 2.6.6) in two: once a micro-batch, and what follows a batch's last backward once."""

    policy: MemoryPolicy

    def backward_part(self, loss: Tensor, optimizer: Optimizer, share: float | None) -> Tensor:
        """Run one micro-batch's backward, without what follows the batch's last.

        `on_before_backward` sees the micro-batch's own loss, so that what it logs averages to the batch's; what is
        differentiated is the loss's `share` of the batch.
        """
        assert self.lightning_module is not None
        self.policy.caches.sample()
        self.pre_backward(loss)
        scaled = self.precision_plugin.pre_backward(loss, self.lightning_module)
        if share is not None:
            scaled = scaled * share
        self.precision_plugin.backward(scaled, self.lightning_module, optimizer)
        return scaled

    def after_backward(self, loss: Tensor) -> None:
        """Run what follows the last backward of a batch: hooks see its gradients once, and whole."""
        assert self.lightning_module is not None
        self.post_backward(self.precision_plugin.post_backward(loss, self.lightning_module))
