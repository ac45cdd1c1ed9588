"""AdamW of the classifier: matrices decay, biases and layer norms do not; with a schedule."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn

from lightning_unified.models.training import decay_groups, scheduled_adamw

__all__ = ["build_optimizer"]


def build_optimizer(network: nn.Module, *, hparams: Mapping[str, Any], trainer: Trainer) -> OptimizerLRSchedulerConfig:
    """Return AdamW and its schedule, one value a step.

    Args:
        network: The network; its frozen parameters are left out.
        hparams: `learning_rate`, `weight_decay`, `betas`, `eps`, `warmup_share`, `schedule` and `optimizer_kernel`.
        trainer: See `scheduled_adamw`.

    Raises:
        ValueError: If the schedule depends on the last step and the run has no end.
    """
    share, schedule, total = hparams["warmup_share"], hparams["schedule"], trainer.estimated_stepping_batches
    if not math.isfinite(total) and (schedule != "constant" or share):
        raise ValueError(
            f"schedule={schedule!r} and warmup_share={share} need to know the last step; set max_steps or max_epochs, or "
            "schedule=constant and warmup_share=0."
        )
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = decay_groups(trained, weight_decay=hparams["weight_decay"])
    warmup_steps = round(share * total) if share else 0
    return scheduled_adamw(groups, hparams={**hparams, "warmup_steps": warmup_steps}, trainer=trainer)
