"""The last step of a run is validated, wherever the interval falls, so that `best.ckpt` knows about it."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

__all__ = ["ValidateAtEnd"]


class ValidateAtEnd(Callback):
    """Make a validation due at the last optimizer step that `max_steps` or `max_epochs` allows.

    Lightning validates every `val_check_interval` batches and drops what is left over. Its loop asks
    `trainer.val_check_batch` after each batch (`_TrainingEpochLoop._should_check_val_fx`, 2.6.6); this sets it so that the
    answer is yes after the last one.
    """

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        if trainer.check_val_every_n_epoch is None and trainer.global_step + 1 == trainer.estimated_stepping_batches:
            trainer.val_check_batch = loop.total_batch_idx + 1
