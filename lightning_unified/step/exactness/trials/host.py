"""Run a module on the CPU in float32 or float64, on copies of its weights."""

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

from lightning_unified.hardware.readers import read
from lightning_unified.step.results.metrics import metrics_of

__all__ = ["bytes_of_copies", "has_room", "may_be_wrong", "on_host", "to_host"]

# devices with known wrong gradients in large backward passes (pytorch issue 177116)
_WRONG_AT_TIMES = ("mps",)

_HALVES = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float32: dict.fromkeys(_HALVES, torch.float32),
    torch.float64: {**dict.fromkeys((*_HALVES, torch.float32), torch.float64), torch.complex64: torch.complex128},
}


def may_be_wrong(device: torch.device) -> bool:
    """Return whether a device sometimes computes wrong gradients, so that the CPU decides."""
    return device.type in _WRONG_AT_TIMES


def bytes_of_copies(module: nn.Module, least: torch.dtype = torch.float32) -> int:
    """Return the bytes of copies of parameters and buffers as `least`, and of trained gradients."""
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return least.itemsize * (sum(one.numel() for one in (*module.parameters(), *module.buffers())) + trained)


def has_room(module: nn.Module, least: torch.dtype) -> bool:
    """Return whether the host has room for copies of a module's weights as `least`, and for as much again."""
    available = read("cpu").available.bytes
    return available is not None and 2 * bytes_of_copies(module, least) <= available


@contextmanager
def on_host(trainer: L.Trainer, least: torch.dtype = torch.float32) -> Iterator[Sequence[Tensor]]:
    """Run the module on the CPU, on copies of its weights; yield the trained copies.

    Args:
        trainer: The Trainer.
        least: The format of the copies of parameters and buffers that have a coarser one: float32 or float64. New tensors get it too.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    with ExitStack() as undo:
        if torch.empty(0).element_size() < least.itemsize:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(least)
        parameters = {
            id(one): nn.Parameter(to_host_tensor(one, least), one.requires_grad) for one in module.parameters()
        }
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
                {name: one if one is None else to_host_tensor(one, least) for name, one in owner._buffers.items()}
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


def to_host(batch: Any, least: torch.dtype = torch.float32) -> Any:
    """Return a copy of a batch on the CPU, with tensors of coarser formats than `least` in that one."""
    return apply_to_collection(batch, Tensor, to_host_tensor, least)


def to_host_tensor(tensor: Tensor, least: torch.dtype) -> Tensor:
    dtype = _WIDER[least].get(tensor.dtype, tensor.dtype)
    return tensor.detach().to("cpu", dtype, copy=True)
