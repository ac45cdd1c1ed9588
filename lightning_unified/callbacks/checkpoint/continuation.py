"""What a run needs beside Lightning's checkpoint to go on as if it had never stopped, and when each part is put back."""

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
    """Random states of all ranks and the gradients of an open accumulation window, in a checkpoint and out of it.

    When to restore random states depends on where they were noted. After an epoch's last batch the next thing to draw is the
    iterator of the next epoch's loader, so they are put back before Lightning makes it. In the middle of an epoch a resumed run
    makes an iterator that the run it continues did not make there, so they are put back after it, at the first batch.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None
        self._resumes = False
        self._skips_validation = False
        self._limit: int | float | None = None

    def note(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any], *, called_off: bool) -> None:
        """Write this moment into `checkpoint`; every rank must call it.

        Args:
            trainer: In the middle of `fit`.
            module: Whose gradients an open window has.
            checkpoint: What Lightning is about to write.
            called_off: Whether the validation due after this batch will not run because the run is stopping.
        """
        state = random_state.capture(trainer.strategy.root_device.type)
        noted: dict[str, Any] = {
            "random": random_state.gather(state),
            "epoch_is_over": trainer.is_last_batch,
            "validation_called_off": called_off,
        }
        # other ranks hold other halves of an open window's gradients, and one file has room for one
        if window_is_open(trainer) and trainer.world_size == 1:
            noted["gradients"] = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            noted["gradient_scale"] = gradient_scale(trainer.precision_plugin)
        checkpoint[_KEY] = noted

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep what `checkpoint` holds until its time comes."""
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
        """Drop what a load that no training followed has left (`validate`, then `fit` from new weights)."""
        self._loaded, self._resumes, self._skips_validation = None, False, False

    def before_loaders(self, trainer: Trainer) -> None:
        """Restore what was noted at an epoch's end."""
        if self._loaded is not None and self._loaded["epoch_is_over"]:
            self._restore_random(trainer, self._loaded)
            self._loaded = None

    def before_epoch(self, trainer: Trainer) -> None:
        """Keep Lightning from making an iterator of the validation loader only to count a called-off validation as done; begin epochs in full.

        Not where a validation at an epoch's end was left: there Lightning skips it by itself, and without one that is due it would
        take another batch into the epoch that is over.
        """
        if self._skips_validation and not resumes_after_an_epochs_last_batch(trainer):
            self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
        self._skips_validation = False
        if self._resumes:
            begin_epoch_after_resume(trainer)

    def before_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """Restore what was noted in the middle of an epoch, and undo `before_epoch`."""
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
        """Give an open window its gradients, under the scale of this run: a change of precision changes it."""
        gradients = loaded.get("gradients", {})
        if not gradients:
            return
        factor = gradient_scale(trainer.precision_plugin) / loaded.get("gradient_scale", 1.0)
        if factor != 1 and not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            rank_zero_warn(
                "the gradients of the open accumulation window were not finite in 16-mixed, whose scaler would have skipped their step; "
                "in this precision they would spoil the weights, so the window goes on without them"
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
                f"the checkpoint holds random states of {len(states)} processes and {trainer.world_size} are here: "
                "they start from their own seeds, so the resumed run differs from one that was never stopped"
            )
            return
        missing = random_state.restore(states[trainer.global_rank], device_type=trainer.strategy.root_device.type)
        if missing:
            rank_zero_info(f"random states that were not restored: {'; '.join(missing)}")
