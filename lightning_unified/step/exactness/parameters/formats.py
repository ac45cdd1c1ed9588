"""Compute a check in the parameters' own format."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["has_autocast", "precise", "reduced_formats"]


def has_autocast(trainer: L.Trainer) -> bool:
    """Return whether steps run with autocast."""
    return isinstance(trainer.strategy._precision_plugin, MixedPrecision)


@contextmanager
def precise(trainer: L.Trainer, *, keeps_autocast: bool) -> Iterator[None]:
    """Compute in the parameters' own format: without autocast, unless it is kept, and without TF32."""
    strategy = trainer.strategy
    plugin = strategy._precision_plugin
    with ExitStack() as undo:
        undo.enter_context(_without_tf32())
        if "torch._dynamo" in sys.modules:  # compiled code hides random draws from the mode
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        if has_autocast(trainer) and not keeps_autocast:
            undo.callback(setattr, strategy, "_precision_plugin", plugin)
            strategy._precision_plugin = Precision()
        yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute float32 in float32 inside the block.

    torch 2.13 has two switches for each kind of operator. While they contradict each other, reading the older one raises an error.
    `torch.backends.cudnn.flags` reads it, for instance in CTC losses. So this block sets the older switches too, if they can be read.
    """
    cudnn: Any = torch.backends.cudnn
    places = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    with ExitStack() as undo:
        for place in places:
            undo.callback(setattr, place, "fp32_precision", place.fp32_precision)
        with suppress(RuntimeError):
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            cudnn.allow_tf32 = False
        for place in places:
            if place.fp32_precision == "tf32":
                place.fp32_precision = "ieee"
        yield


def reduced_formats(module: nn.Module) -> set[torch.dtype]:
    """Return the formats that policies of sharded modules in `module` name for reductions."""
    states = (child._get_fsdp_state() for child in module.modules() if isinstance(child, FSDPModule))
    formats = (state._mp_policy.reduce_dtype for state in states)
    return {one for one in formats if one is not None}
