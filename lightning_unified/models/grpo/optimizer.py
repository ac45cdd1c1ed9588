"""AdamW over what is trained of a policy, and a learning rate of two phases: supervised steps first, then GRPO."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["build_optimizer", "phased_factor"]


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, hparams: Mapping[str, Any], total_steps: float, precision: str = "32-true"
) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value a step.

    Args:
        parameters: Those that are trained.
        hparams: `learning_rate`, `sft_learning_rate`, `sft_steps`, `weight_decay`, `betas`, `eps`, `warmup_steps`, `schedule` and
            `optimizer_kernel`.
        total_steps: Optimizer steps of the run, where a falling schedule reaches 0.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If nothing is trained.
    """
    trained = list(parameters)
    if not trained:
        raise ValueError(
            "no weight of the policy requires a gradient; give it adapters, or unfreeze what is to be trained."
        )
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=trained[0].device.type, precision=precision)
    optimizer = torch.optim.AdamW(
        trained,
        lr=hparams["learning_rate"],
        weight_decay=hparams["weight_decay"],
        betas=tuple(hparams["betas"]),
        eps=hparams["eps"],
        **kernel,
    )
    factor = partial(
        phased_factor,
        sft_steps=hparams["sft_steps"],
        sft_share=hparams["sft_learning_rate"] / hparams["learning_rate"],
        warmup_steps=hparams["warmup_steps"],
        total_steps=total_steps,
        schedule=hparams["schedule"],
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def phased_factor(
    step: int, *, sft_steps: int, sft_share: float, warmup_steps: int, total_steps: float, schedule: str
) -> float:
    """Return the share of GRPO's peak learning rate used by optimizer step `step`; each phase rises and falls by itself.

    Args:
        step: The first is 0.
        sft_steps: Steps of the first phase.
        sft_share: Its peak, over GRPO's.
        warmup_steps: Of each phase, as `nn.adamw.learning_rate_factor` takes them.
        total_steps: Of both phases.
        schedule: "linear", "cosine" or "constant".
    """
    if step < sft_steps:
        return sft_share * learning_rate_factor(
            step, warmup_steps=warmup_steps, total_steps=sft_steps, schedule=schedule
        )
    return learning_rate_factor(
        step - sft_steps, warmup_steps=warmup_steps, total_steps=total_steps - sft_steps, schedule=schedule
    )
