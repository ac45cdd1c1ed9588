"""AdamW of GearHead: biases and layer norms do not decay."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_unified.nn.adamw import kernel_arguments

__all__ = ["build_optimizer"]


def build_optimizer(network: nn.Module, *, hparams: Mapping[str, Any], precision: str = "32-true") -> torch.optim.AdamW:
    """Return AdamW over `network`; biases and layer norms do not decay.

    Args:
        network: The network to train.
        hparams: `learning_rate`, `weight_decay`, `betas`, `eps` and `optimizer_kernel`.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If the fused kernel is requested but not available.
    """
    decayed, plain = [], []
    for name, parameter in network.named_parameters():
        exempt = name.endswith("bias") or name.rsplit(".", 2)[-2].startswith("ln_")
        (plain if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": hparams["weight_decay"]},
        {"params": plain, "weight_decay": 0.0},
    ]
    device = decayed[0].device.type
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=device, precision=precision)
    return torch.optim.AdamW(
        groups, lr=hparams["learning_rate"], betas=tuple(hparams["betas"]), eps=hparams["eps"], **kernel
    )
