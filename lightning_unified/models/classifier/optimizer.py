"""AdamW of the classifier: matrices decay, biases and layer norms do not; with a schedule."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
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


def build_optimizer(network: nn.Module, *, hparams: Mapping[str, Any], trainer: Trainer) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value a step.

    Args:
        network: The network; its frozen parameters are left out.
        hparams: `learning_rate`, `weight_decay`, `betas`, `eps`, `warmup_share`, `schedule` and `optimizer_kernel`.
        trainer: Gives the number of optimizer steps, at whose end a falling schedule reaches 0, and the precision: "16-mixed"
            brings a scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If the schedule depends on the last step and the run has no end.
    """
    share, schedule, total = hparams["warmup_share"], hparams["schedule"], trainer.estimated_stepping_batches
    if not math.isfinite(total) and (schedule != "constant" or share):
        raise ValueError(
            f"schedule={schedule!r} and warmup_share={share} need to know the last step; set max_steps or max_epochs, or "
            "schedule=constant and warmup_share=0."
        )
    groups = decay_groups(network, weight_decay=hparams["weight_decay"])
    device = next(network.parameters()).device.type
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=device, precision=str(trainer.precision))
    optimizer = torch.optim.AdamW(
        groups, lr=hparams["learning_rate"], betas=tuple(hparams["betas"]), eps=hparams["eps"], **kernel
    )
    warmup = round(share * total) if share else 0
    factor = partial(learning_rate_factor, warmup_steps=warmup, total_steps=total, schedule=schedule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
