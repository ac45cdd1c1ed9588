"""The backward pass of a batch that runs as micro-batches, for the strategies."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.undone_run import parameters_of_step
from lightning_unified.step.results.logs import inside_hook

__all__ = ["MicroBatchBackward"]


class MicroBatchBackward(Strategy):
    """Splits `Strategy.backward`: micro-batches' backward passes, then the hooks after them."""

    policy: MemoryPolicy
    _batchs_leaves: tuple[Tensor, ...] = ()
    _batchs_parameters: tuple[Tensor, ...] | None = None

    def backward_micro_batch(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        share: float | None,
        first: bool,
        leaves: Sequence[Tensor] = (),
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run one micro-batch's backward pass, without the hooks that follow the batch's last.

        `on_before_backward` and `LightningModule.backward` get the micro-batch's own loss. If they log it, the mean of
        the logs is the batch's loss. The gradient is multiplied by the loss's `share` of the batch.

        If the module's own code may write gradients during the backward pass, it finds those of this micro-batch alone, as in the
        exactness check. They are multiplied by the share and added to the others afterwards. So are they if the check has shown that they
        are not proportional to the loss, or that the backward pass keeps them.

        Args:
            loss: The micro-batch's loss.
            optimizer: The optimizer that steps after the batch.
            share: The factor of the loss; None if the loss is already its share.
            first: Whether it is the batch's first backward pass. The module's parameters are then listed anew, if a share needs them: each
                walk through a deep module takes about as long as the launches of a block.
            leaves: Other tensors that get gradients; read at the first backward pass.
            kept: Tensors of this micro-batch that keep their gradient.
        """
        assert self.lightning_module is not None
        if first:
            self._batchs_leaves, self._batchs_parameters = tuple(leaves), None
        self.policy.caches.sample()
        self.pre_backward(loss)
        # no hook sees the loss of a micro-batch without loss terms
        scaled = loss if share == 0 else self.precision_plugin.pre_backward(loss, self.lightning_module)
        alone = share is not None and (
            not self.policy.splits.passes.is_proportional
            or _writes_gradients(self.lightning_module, self._parameters_of_batch())
        )
        if share is not None and not alone:
            scaled = _Share.apply(scaled, share)
        with (
            inside_hook(self.lightning_module, "backward"),
            _added_after(_each_once(*self._parameters_of_batch(), *kept), share)
            if alone and share is not None
            else nullcontext(),
        ):
            self.precision_plugin.backward(scaled, self.lightning_module, optimizer)
        return scaled

    def _parameters_of_batch(self) -> tuple[Tensor, ...]:
        """Return the tensors that the batch's backward passes may give gradients, listed once a batch."""
        if self._batchs_parameters is None:
            assert self.lightning_module is not None
            listed = parameters_of_step(self.lightning_module.trainer)
            self._batchs_parameters = _each_once(*listed, *self._batchs_leaves)
        return self._batchs_parameters

    def after_backward(self, loss: Tensor) -> None:
        """Run the hooks after a batch's last backward pass, when its gradient is complete."""
        assert self.lightning_module is not None
        self.post_backward(self.precision_plugin.post_backward(loss, self.lightning_module))


def _each_once(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple({id(one): one for one in tensors}.values())


def _writes_gradients(module: L.LightningModule, parameters: Iterable[Tensor]) -> bool:
    """Return whether code of the module may write `.grad` of its parameters during the backward pass."""
    hooks = (one._post_accumulate_grad_hooks for one in parameters)
    hooked = any(not getattr(hook, "leaves_gradients", False) for own in hooks if own for hook in own.values())
    return hooked or is_overridden("backward", module)


@contextmanager
def _added_after(parameters: Iterable[Tensor], share: float) -> Iterator[None]:
    """Set gradients aside inside the block, and add those that it leaves, multiplied by `share`."""
    held = [(one, one.grad) for one in parameters if one.requires_grad]
    for one, _ in held:
        one.grad = None
    try:
        yield
    except BaseException:
        for one, before in held:
            one.grad = before
        raise
    with torch.no_grad():
        for one, before in held:
            own = one.grad
            if own is not None:
                own = own * share  # not in place: the module's code may keep its gradient
                one.grad = own if before is None else before.add_(own)
            else:
                one.grad = before


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
