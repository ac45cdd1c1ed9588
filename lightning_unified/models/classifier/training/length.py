"""Callback that chooses the number of epochs, so that a fit has enough optimizer steps.

Few rows need more epochs.
"""

import math

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

__all__ = ["TrainingLength", "epochs_for"]


def epochs_for(*, steps: int, epochs: int, least_steps: int, validations: int) -> tuple[int, int]:
    """Return the number of epochs, and after how many of them to validate.

    Args:
        steps: Optimizer steps of an epoch.
        epochs: Least number of epochs.
        least_steps: Least number of optimizer steps of the fit.
        validations: Most validations of a fit that has more than `epochs` epochs.
    """
    needed = math.ceil(least_steps / max(steps, 1))
    if needed <= epochs:
        return epochs, 1
    every = math.ceil(needed / validations)
    return math.ceil(needed / every) * every, every


class TrainingLength(Callback):
    """Set the epochs of a fit without an end of its own: `epochs`, or more with few rows.

    With few rows, three epochs are a dozen steps, most of them in the warm-up of the learning rate. The callback then trains for
    `least_steps` steps and validates every few epochs, so that early stopping does not end the fit in the warm-up.

    It has no effect if `max_steps` or `max_epochs` ends the fit.

    Args:
        epochs: Least number of epochs.
        least_steps: Least number of optimizer steps.
        validations: Most validations of a fit that has more than `epochs` epochs.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, *, epochs: int = 3, least_steps: int = 200, validations: int = 10) -> None:
        for name, value in {"epochs": epochs, "least_steps": least_steps, "validations": validations}.items():
            if value < 1:
                raise ValueError(f"{name}={value}; give 1 or more.")
        self.epochs, self.least_steps, self.validations = epochs, least_steps, validations
        self._described = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = getattr(trainer, "datamodule", None)
        if stage != "fit" or data is None or trainer.max_epochs != -1 or trainer.max_steps != -1:
            return
        batches = len(data.train_dataloader())
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))
        steps = max(math.ceil(batches / trainer.accumulate_grad_batches), 1)
        epochs, every = epochs_for(
            steps=steps, epochs=self.epochs, least_steps=self.least_steps, validations=self.validations
        )
        trainer.fit_loop.max_epochs = epochs
        if every > 1:
            trainer.check_val_every_n_epoch = every
        self._described = (
            f"at most {epochs} epochs of {steps} step{'s' if steps > 1 else ''}, a validation every {every if every > 1 else ''} "
            f"epoch{'s' if every > 1 else ''}; trainer.max_epochs sets another number"
        ).replace("  ", " ")

    def describe_line(self) -> str:
        """Return the chosen length; empty if the fit has an end of its own."""
        return self._described
