"""AdamW of the compressor, with two groups, policy and reader, and their schedule."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

from lightning_unified.models.compressor.network.codec import Codec
from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["build_optimizer"]


def build_optimizer(
    codec: Codec, *, hparams: Mapping[str, Any], total_steps: float, precision: str = "32-true"
) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value per step.

    The mask's embedding and the separator are in the reader's group.

    Args:
        codec: The networks to train.
        hparams: `learning_rate`, `policy_learning_rate`, `weight_decay`, `policy_weight_decay`, `betas`, `eps`, `warmup_steps`,
            `schedule` and `optimizer_kernel`.
        total_steps: Optimizer steps of the run, where a falling schedule reaches 0.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.
    """
    policy = list(codec.policy.parameters())
    own = {id(parameter) for parameter in policy}
    reader = [parameter for parameter in codec.parameters() if id(parameter) not in own]
    groups = [
        {"params": policy, "lr": hparams["policy_learning_rate"], "weight_decay": hparams["policy_weight_decay"]},
        {"params": reader, "lr": hparams["learning_rate"], "weight_decay": hparams["weight_decay"]},
    ]
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=policy[0].device.type, precision=precision)
    optimizer = torch.optim.AdamW(groups, betas=tuple(hparams["betas"]), eps=hparams["eps"], **kernel)
    factor = partial(
        learning_rate_factor,
        warmup_steps=hparams["warmup_steps"],
        total_steps=total_steps,
        schedule=hparams["schedule"],
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
