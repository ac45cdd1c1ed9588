"""Run a module on the CPU in float32, on copies of its weights."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_unified.step.results.metrics import metrics_of

__all__ = ["may_be_wrong", "on_host", "to_host"]

# devices with known wrong gradients in large backward passes (pytorch issue 177116)
_WRONG_AT_TIMES = ("mps",)


def may_be_wrong(device: torch.device) -> bool:
    """Return whether a device sometimes computes wrong gradients, so that the CPU decides."""
    return device.type in _WRONG_AT_TIMES


@contextmanager
def on_host(trainer: L.Trainer) -> Iterator[Sequence[Tensor]]:
    """Run the module on the CPU, on copies of its weights; yield the trained copies.

    The copies of 16-bit parameters and buffers are float32.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    with ExitStack() as undo:
        parameters = {id(one): nn.Parameter(to_host_tensor(one), one.requires_grad) for one in module.parameters()}
        trained = [parameters[id(one)] for one in module.parameters() if one.requires_grad]
        for owner in module.modules():
            if isinstance(owner, Metric):
                continue
            undo.callback(owner._parameters.update, dict(owner._parameters))
            undo.callback(owner._buffers.update, dict(owner._buffers))
            owner._parameters.update(
                {name: one if one is None else parameters[id(one)] for name, one in owner._parameters.items()}
            )
            owner._buffers.update(
                {name: one if one is None else to_host_tensor(one) for name, one in owner._buffers.items()}
            )
            if isinstance(owner, nn.RNNBase):  # also keeps a list of its weights
                undo.callback(setattr, owner, "_flat_weights", owner._flat_weights)
                owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]
            if "_device" in vars(owner):  # `self.device` of a LightningModule
                undo.callback(setattr, owner, "_device", vars(owner)["_device"])
                owner._device = torch.device("cpu")  # type: ignore[assignment]
        for metric in metrics_of(module):
            undo.callback(metric.to, metric.device)
            metric.to("cpu")
        undo.callback(setattr, strategy, "_precision_plugin", strategy._precision_plugin)
        strategy._precision_plugin = Precision()
        if "torch._dynamo" in sys.modules:  # compiled code runs on its device only
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield trained


def to_host(batch: Any) -> Any:
    """Return a copy of a batch on the CPU, with 16-bit tensors as float32."""
    return apply_to_collection(batch, Tensor, to_host_tensor)


def to_host_tensor(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)
