"""AdamW of the classifier: matrices decay, biases and layer norms do not; with a schedule."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["build_optimizer", "decay_groups"]


def decay_groups(network: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters in two groups: matrices decay, vectors do not."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(
    network: nn.Module, *, hparams: Mapping[str, Any], total_steps: float, precision: str = "32-true"
) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value a step.

    Args:
        network: The network; its frozen parameters are left out.
        hparams: `learning_rate`, `weight_decay`, `betas`, `eps`, `warmup_share`, `schedule` and `optimizer_kernel`.
        total_steps: Optimizer steps of the run, where a falling schedule reaches 0.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.
    """
    groups = decay_groups(network, weight_decay=hparams["weight_decay"])
    device = next(network.parameters()).device.type
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=device, precision=precision)
    optimizer = torch.optim.AdamW(
        groups, lr=hparams["learning_rate"], betas=tuple(hparams["betas"]), eps=hparams["eps"], **kernel
    )
    share = hparams["warmup_share"]
    factor = partial(
        learning_rate_factor,
        warmup_steps=round(share * total_steps) if share else 0,
        total_steps=total_steps,
        schedule=hparams["schedule"],
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
