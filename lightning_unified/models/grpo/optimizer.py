"""AdamW with a learning rate of two phases: supervised training and GRPO."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.models.choices import check_numbers
from lightning_unified.models.training import check_optimizer_choices, scheduled_adamw
from lightning_unified.nn.adamw import learning_rate_factor

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
        check_optimizer_choices(schedule=self.schedule, optimizer_kernel=self.optimizer_kernel)
        check_numbers(
            positive={name: getattr(self, name) for name in ("learning_rate", "sft_learning_rate", "eps")},
            not_negative={name: getattr(self, name) for name in ("sft_steps", "warmup_steps", "weight_decay")},
        )


def build_optimizer(
    parameters: Iterable[nn.Parameter], *, rates: Rates, trainer: Trainer
) -> OptimizerLRSchedulerConfig:
    """Return AdamW over the trained parameters, and its schedule, one value a step.

    Args:
        parameters: The policy's parameters; those that require a gradient are trained.
        rates: Learning rates and schedule.
        trainer: Gives the number of optimizer steps, where a falling schedule reaches 0, and the precision: "16-mixed" brings a
            scaler, with which Lightning clips no gradients of a fused optimizer.

    Raises:
        ValueError: If there is no trained parameter, or the schedule falls to 0 and the run has no end.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "no weight of the policy requires a gradient; give it adapters, or unfreeze the weights to train."
        )
    groups = [{"params": trained, "weight_decay": rates.weight_decay}]
    share = partial(_share, sft_steps=rates.sft_steps, sft_peak=rates.sft_learning_rate / rates.learning_rate)
    return scheduled_adamw(groups, hparams=asdict(rates), trainer=trainer, share=share)


def _share(step: int, *, sft_steps: int, sft_peak: float, total_steps: float, **schedule: Any) -> float:
    """Return the learning rate of optimizer step `step`, from 0, as a share of GRPO's peak.

    The learning rate rises and falls once in each phase.
    """
    if step < sft_steps:
        return sft_peak * learning_rate_factor(step, total_steps=sft_steps, **schedule)
    return learning_rate_factor(step - sft_steps, total_steps=total_steps - sft_steps, **schedule)
