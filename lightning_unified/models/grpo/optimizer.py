"""AdamW over a policy's trained weights, with a learning rate of two phases: supervised training and GRPO."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.models.choices import check_choice
from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["Rates", "build_optimizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Optimizer settings; each is the argument of `GRPO` of that name.

    Raises:
        ValueError: If a name is unknown or a number is out of range.
    """

    sft_steps: int
    sft_learning_rate: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    warmup_steps: int
    schedule: Literal["linear", "cosine", "constant"]
    optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"]

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("linear", "cosine", "constant"))
        check_choice("optimizer_kernel", self.optimizer_kernel, ("auto", "fused", "foreach", "forloop"))
        for name in ("learning_rate", "sft_learning_rate", "eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        for name in ("sft_steps", "warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}; give 0 or more.")


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, rates: Rates, trainer: Trainer
) -> OptimizerLRSchedulerConfig:
    """Return AdamW over the parameters that require a gradient, and its schedule, one value a step.

    Args:
        parameters: The policy's parameters.
        rates: Learning rates and schedule.
        trainer: Gives the number of optimizer steps, where a falling schedule reaches 0, and the precision: "16-mixed" brings a
            scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If there is no trained parameter, or the schedule falls to 0 and the run has no end.
    """
    total_steps = trainer.estimated_stepping_batches
    if rates.schedule != "constant" and not math.isfinite(total_steps):
        raise ValueError(
            f"schedule={rates.schedule!r} needs to know the last step; set max_steps or max_epochs, or schedule=constant."
        )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "no weight of the policy requires a gradient; give it adapters, or unfreeze what is to be trained."
        )
    kernel = kernel_arguments(rates.optimizer_kernel, device=trained[0].device.type, precision=str(trainer.precision))
    optimizer = torch.optim.AdamW(
        trained,
        lr=rates.learning_rate,
        weight_decay=rates.weight_decay,
        betas=rates.betas,
        eps=rates.eps,
        **kernel,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_factor, rates=rates, total_steps=total_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _factor(step: int, *, rates: Rates, total_steps: float) -> float:
    """Return the learning rate of optimizer step `step`, from 0, as a share of GRPO's peak.

    The learning rate rises and falls once in each phase.
    """
    factor = partial(learning_rate_factor, warmup_steps=rates.warmup_steps, schedule=rates.schedule)
    if step < rates.sft_steps:
        return rates.sft_learning_rate / rates.learning_rate * factor(step, total_steps=rates.sft_steps)
    return factor(step - rates.sft_steps, total_steps=total_steps - rates.sft_steps)
