"""AdamW with a learning-rate schedule, and sums over a validation epoch, for all models."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_unified.models.choices import check_choice
from lightning_unified.nn.adamw import kernel_arguments, learning_rate_factor

__all__ = ["EpochSums", "adamw", "check_optimizer_choices", "decay_groups", "scheduled_adamw"]

_SCHEDULES = ("linear", "cosine", "constant")
_KERNELS = ("auto", "fused", "foreach", "forloop")


def check_optimizer_choices(*, schedule: str, optimizer_kernel: str) -> None:
    """Raise a ValueError if there is no such schedule or optimizer kernel."""
    check_choice("schedule", schedule, _SCHEDULES)
    check_choice("optimizer_kernel", optimizer_kernel, _KERNELS)


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in two groups: matrices decay, biases and norms (vectors) do not."""
    given = list(parameters)
    return [
        {"params": [parameter for parameter in given if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in given if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(groups: list[dict[str, Any]], *, hparams: Mapping[str, Any], precision: str = "32-true") -> torch.optim.AdamW:
    """Return AdamW over parameter groups.

    Args:
        groups: Parameter groups; a group may have its own `lr` and `weight_decay`.
        hparams: `learning_rate`, `betas`, `eps` and `optimizer_kernel`.
        precision: The Trainer's; "16-mixed" brings a scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If the fused kernel is requested but not available.
    """
    device = groups[0]["params"][0].device.type
    kernel = kernel_arguments(hparams["optimizer_kernel"], device=device, precision=precision)
    return torch.optim.AdamW(
        groups, lr=hparams["learning_rate"], betas=tuple(hparams["betas"]), eps=hparams["eps"], **kernel
    )


def scheduled_adamw(
    groups: list[dict[str, Any]],
    *,
    hparams: Mapping[str, Any],
    trainer: Trainer,
    share: Callable[..., float] = learning_rate_factor,
) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value per step, for the Trainer's estimated steps.

    Args:
        groups: As for `adamw`.
        hparams: As for `adamw`, with `warmup_steps` and `schedule`.
        trainer: Gives the precision and the number of optimizer steps, where a falling schedule reaches 0.
        share: Returns a step's share of the peak learning rate, with the arguments of `nn.adamw.learning_rate_factor`.

    Raises:
        ValueError: If the schedule falls to 0 and the run has no end, or the fused kernel is not available.
    """
    schedule, total = hparams["schedule"], trainer.estimated_stepping_batches
    if schedule != "constant" and not math.isfinite(total):
        raise ValueError(
            f"schedule={schedule!r} needs to know the last step; set max_steps or max_epochs, or schedule=constant."
        )
    optimizer = adamw(groups, hparams=hparams, precision=str(trainer.precision))
    factor = partial(share, warmup_steps=hparams["warmup_steps"], total_steps=total, schedule=schedule)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class EpochSums(Metric):
    """Add up a vector of `size` sums; exact for any split over micro-batches and processes."""

    full_state_update = False
    sums: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(size), dist_reduce_fx="sum")

    @override
    def update(self, sums: Tensor) -> None:
        """Add the sums (size) of one batch."""
        self.sums += sums

    @override
    def compute(self) -> Tensor:
        """Return the sums (size) over all batches and processes."""
        return self.sums
