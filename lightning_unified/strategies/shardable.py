"""What can be trained sharded, and the ranks' equal start."""

import zlib
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Optimizer

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.ranks.consensus import Point, Ranks

__all__ = [
    "bytes_of_whole",
    "copy_from_first",
    "refuse_averages",
    "refuse_module",
    "refuse_optimizers",
    "refuse_placements",
]


def bytes_of_whole(module: nn.Module, *, ranks: int) -> int:
    """Return the bytes of whole parameters and gradients beside a rank's shards.

    The shards are those of parameters, gradients, two states of the optimizer, and the copies of an optimizer step.
    """
    held = sum(one.numel() * one.element_size() for one in module.parameters())
    trained = sum(one.numel() * one.element_size() for one in module.parameters() if one.requires_grad)
    return held + trained + (held + 6 * trained) // ranks


def refuse_module(module: L.LightningModule, precision: Precision, *, trains: bool) -> None:
    """Raise `ConfigurationError` for what cannot be trained sharded."""
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise ConfigurationError(
            'strategy="unified_fsdp" cannot train with precision="16-mixed": each rank has other rows of the gradients, and its scaler would '
            "decide by these alone. Use bf16-mixed, bf16-true or 32-true."
        )
    if trains and not module.automatic_optimization:
        raise ConfigurationError(
            'strategy="unified_fsdp" needs automatic optimization: gradients are reduced in its step. Use automatic optimization, or '
            "Lightning's ModelParallelStrategy."
        )
    sharded = [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]
    if sharded and any(not isinstance(one, DTensor) for one in module.parameters()):
        name = next(name for name, one in module.named_parameters() if not isinstance(one, DTensor))
        raise ConfigurationError(
            f"configure_model of {type(module).__name__} shards {sharded[0] or 'the module'} and leaves {name} whole, whose gradient no rank "
            'would reduce; shard every parameter, or none, so that strategy="unified_fsdp" does.'
        )


def refuse_averages(trainer: L.Trainer) -> None:
    """Raise `ConfigurationError` for callbacks that average weights in a whole copy of the module."""
    callbacks: list[Any] = vars(trainer)["callbacks"] if trainer.state.fn == TrainerFn.FITTING else []
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ConfigurationError(
                f'strategy="unified_fsdp" cannot run {type(callback).__name__}, which copies the whole module before it is sharded and then '
                'averages shards into it. Leave it out, or use strategy="unified_ddp".'
            )


def refuse_placements(module: nn.Module) -> None:
    """Raise `ConfigurationError` unless each parameter is divided by rows over all ranks."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
            raise ConfigurationError(
                f'strategy="unified_fsdp" divides each parameter by rows over all ranks, and {name} is '
                f"{getattr(parameter, 'placements', 'whole')}. Hybrid sharding and tensor parallelism are not supported: in configure_model, "
                "call fully_shard with a mesh of one dimension (self.device_mesh) and no shard_placement_fn."
            )


def refuse_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise `ConfigurationError` for optimizers that cannot run on shards."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                'strategy="unified_fsdp" cannot run LBFGS, which computes with all parameters in one vector; use another optimizer.'
            )


def copy_from_first(module: nn.Module, ranks: Ranks) -> None:
    """Give all ranks the first rank's parameters and buffers.

    Raises:
        ConfigurationError: If the ranks built different modules.
    """
    held = [*module.named_parameters(), *module.named_buffers()]
    description = "\n".join(f"{name} {tuple(value.shape)} {value.dtype} {value.device.type}" for name, value in held)
    words = ranks.meet(Point.MODULE, digest=zlib.crc32(description.encode()))
    other = next((word.rank for word in words if word.digest != words[0].digest), None)
    if other is not None:
        ranks.end()
        raise ConfigurationError(
            f"rank {other} made another {type(module).__name__} than rank 0: its parameters differ in number, name, shape or type. Build "
            "the module from the same arguments on all ranks."
        )
    with torch.no_grad():
        for _, value in held:
            if value.numel() and not value.is_meta:
                sent = value.detach().contiguous()
                ranks.broadcast(sent.view(-1).view(torch.uint8), source=0)
                value.copy_(sent)
