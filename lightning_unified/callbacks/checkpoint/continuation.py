"""State for a bit-exact resume that Lightning's checkpoints lack."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_unified.callbacks.checkpoint import random_state
from lightning_unified.callbacks.loops import (
    align_logged_step,
    begin_epoch_after_resume,
    resumes_after_an_epochs_last_batch,
    window_is_open,
)
from lightning_unified.precision import gradient_scale

__all__ = ["Continuation"]

_KEY = "lightning_unified.continuation"


class Continuation:
    """Save and restore random states of all ranks, and gradients of an open window.

    The time of restoring depends on where the states were saved. After an epoch's last batch, the iterator of the next epoch's
    loader draws next, so the states are restored before Lightning creates it. A file of the validation after that batch makes
    Lightning create an iterator for the old epoch first, so they are restored again after it. Inside an epoch, only the resumed
    run creates an iterator, so the states are restored after it, at the first batch.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._at_epochs_end: dict[str, Any] | None = None
        self._resumes = False
        self._skips_validation = False
        self._limit: int | float | None = None

    def note(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any], *, called_off: bool) -> None:
        """Add the current state to `checkpoint`; every rank must call it.

        Args:
            trainer: The Trainer, inside `fit`.
            module: The module whose gradients an open window holds.
            checkpoint: The content that Lightning is about to write.
            called_off: Whether the validation due after this batch will not run because the run is stopping.
        """
        state = random_state.capture(trainer.strategy.root_device.type)
        noted: dict[str, Any] = {
            "random": random_state.gather(state),
            "epoch_is_over": trainer.is_last_batch,
            "validation_called_off": called_off,
        }
        # Each rank holds its own gradients of an open window; the file holds those of one process only.
        if window_is_open(trainer) and trainer.world_size == 1:
            noted["gradients"] = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            noted["gradient_scale"] = gradient_scale(trainer.precision_plugin)
        checkpoint[_KEY] = noted

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the state of `checkpoint` until it is restored."""
        self._resumes = True
        self._loaded = checkpoint.get(_KEY)
        if self._loaded is None:
            rank_zero_warn(
                "the checkpoint was not written with RunCheckpoint: it holds no random states, so the resumed run differs "
                "from one that was never stopped"
            )
        else:
            self._skips_validation = self._loaded["validation_called_off"]

    def forget(self) -> None:
        """Drop loaded state that no training used (`validate`, then `fit` from new weights)."""
        self._loaded = self._at_epochs_end = None
        self._resumes = self._skips_validation = False

    def before_loaders(self, trainer: Trainer) -> None:
        """Restore random states that were saved at an epoch's end."""
        if self._loaded is not None and self._loaded["epoch_is_over"]:
            self._restore_random(trainer, self._loaded)
            self._at_epochs_end, self._loaded = self._loaded, None

    def before_epoch(self, trainer: Trainer) -> None:
        """Skip the loader of a cancelled validation, begin a resumed epoch in full, and restore its random states.

        Otherwise Lightning would create an iterator only to count that validation as done.
        At an epoch's end Lightning skips the validation itself; without a due validation it would train another batch in the old epoch.
        """
        if self._skips_validation and not resumes_after_an_epochs_last_batch(trainer):
            self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
        self._skips_validation = False
        if self._at_epochs_end is not None and resumes_after_an_epochs_last_batch(trainer):
            self._restore_random(trainer, self._at_epochs_end)
        self._at_epochs_end = None
        if self._resumes:
            begin_epoch_after_resume(trainer)

    def before_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """Restore the state that was saved inside an epoch, and undo `before_epoch`."""
        if self._limit is not None:
            trainer.limit_val_batches, self._limit = self._limit, None
        if self._resumes:
            align_logged_step(trainer)
            self._resumes = False
        if self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        self._restore_random(trainer, loaded)
        self._restore_gradients(trainer, module, loaded)

    @staticmethod
    def _restore_gradients(trainer: Trainer, module: LightningModule, loaded: dict[str, Any]) -> None:
        """Restore the gradients of an open window, rescaled to this run's gradient scale."""
        gradients = loaded.get("gradients", {})
        if not gradients:
            return
        factor = gradient_scale(trainer.precision_plugin) / loaded.get("gradient_scale", 1.0)
        if factor != 1 and not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            rank_zero_warn(
                "the gradients of the open accumulation window were not finite in 16-mixed, whose scaler would have skipped their step; "
                "in this precision they would make the weights NaN, so the window continues without them"
            )
            return
        for name, parameter in module.named_parameters():
            if name in gradients:
                gradient = gradients[name].to(parameter.device)
                parameter.grad = gradient if factor == 1 else (gradient * factor).to(parameter.dtype)

    @staticmethod
    def _restore_random(trainer: Trainer, loaded: dict[str, Any]) -> None:
        states = loaded["random"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint holds random states of {len(states)} processes and this run has {trainer.world_size}: "
                "they start from their own seeds, so the resumed run differs from one that was never stopped"
            )
            return
        missing = random_state.restore(states[trainer.global_rank], device_type=trainer.strategy.root_device.type)
        if missing:
            rank_zero_info(f"random states that were not restored: {'; '.join(missing)}")
