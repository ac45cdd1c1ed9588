"""AdamW over a policy's trained weights, with a learning rate of two phases.

The phases are supervised training and GRPO.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["Rates", "build_optimizer", "phased_factor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Optimizer settings; each is the argument of `GRPO` of that name."""

    sft_steps: int
    sft_learning_rate: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    warmup_steps: int
    schedule: str
    optimizer_kernel: str


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, rates: Rates, total_steps: float, precision: str = "32-true"
) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value a step.

    Args:
        parameters: The trained parameters.
        rates: Learning rates and schedule.
        total_steps: Optimizer steps of the run, where a falling schedule reaches 0.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If there is no trained parameter.
    """
    trained = list(parameters)
    if not trained:
        raise ValueError(
            "no weight of the policy requires a gradient; give it adapters, or unfreeze what is to be trained."
        )
    kernel = kernel_arguments(rates.optimizer_kernel, device=trained[0].device.type, precision=precision)
    optimizer = torch.optim.AdamW(
        trained,
        lr=rates.learning_rate,
        weight_decay=rates.weight_decay,
        betas=rates.betas,
        eps=rates.eps,
        **kernel,
    )
    factor = partial(
        phased_factor,
        sft_steps=rates.sft_steps,
        sft_share=rates.sft_learning_rate / rates.learning_rate,
        warmup_steps=rates.warmup_steps,
        total_steps=total_steps,
        schedule=rates.schedule,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def phased_factor(
    step: int, *, sft_steps: int, sft_share: float, warmup_steps: int, total_steps: float, schedule: str
) -> float:
    """Return the learning rate of optimizer step `step` as a share of GRPO's peak.

    The learning rate rises and falls once in each phase.

    The learning rate rises and falls once in each phase.

    Args:
        step: The first is 0.
        sft_steps: Steps of the first phase.
        sft_share: Peak of the first phase divided by GRPO's.
        warmup_steps: Warm-up of each phase, see `nn.adamw.learning_rate_factor`.
        total_steps: Steps of both phases.
        schedule: "linear", "cosine" or "constant".
    """
    if step < sft_steps:
        return sft_share * learning_rate_factor(
            step, warmup_steps=warmup_steps, total_steps=sft_steps, schedule=schedule
        )
    return learning_rate_factor(
        step - sft_steps, warmup_steps=warmup_steps, total_steps=total_steps - sft_steps, schedule=schedule
    )
