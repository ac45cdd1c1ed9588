"""Private state of Lightning's fit loop; callbacks access it only through this module.

Source: lightning 2.6.6, `loops/training_epoch_loop.py`, `loops/fit_loop.py`, `loops/evaluation_loop.py`. Tests pin each function.
"""

from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException

__all__ = [
    "align_logged_step",
    "begin_epoch_after_resume",
    "call_off_validation",
    "is_trial",
    "logged_step",
    "resumes_after_an_epochs_last_batch",
    "total_steps",
    "validation_is_complete",
    "validation_is_due",
    "will_stop",
    "window_is_open",
]


def is_trial(trainer: Trainer) -> bool:
    """Return whether this is a `fast_dev_run`, which leaves no files."""
    return bool(getattr(trainer, "fast_dev_run", False))


def logged_step(trainer: Trainer) -> int:
    """Return the step under which Lightning logs this batch.

    Our metrics then share a row with Lightning's.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def align_logged_step(trainer: Trainer) -> None:
    """Set the logged step to the optimizer step at the first batch of a resumed run.

    Lightning (2.6.6) derives it from whether the resumed run's schedule has a validation at the saved step. It is one too small if
    only the earlier run had a validation there.
    """
    if trainer.lightning_module.automatic_optimization:
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def total_steps(trainer: Trainer) -> float:
    """Return the number of optimizer steps of the whole fit, infinite if unknown."""
    try:
        return trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation that changes with the epoch
        return float("inf")


def window_is_open(trainer: Trainer) -> bool:
    """Return whether the accumulation window stays open after this batch.

    Its gradients are then in `.grad`.
    """
    return trainer.fit_loop._should_accumulate()


def resumes_after_an_epochs_last_batch(trainer: Trainer) -> bool:
    """Return whether this run resumes from within an epoch's last validation.

    The checkpoint was written during the validation after the epoch's last batch.
    """
    loop = trainer.fit_loop.epoch_loop
    return loop.restarted_on_last and loop.batch_progress.is_last_batch


def begin_epoch_after_resume(trainer: Trainer) -> None:
    """Begin the next epoch in full after a resume from an epoch's last batch.

    Call it in `on_train_start`. Lightning (2.6.6) treats the new epoch as the rest of the old one: `on_train_epoch_start` is not
    called, the epoch is not counted as begun, and a file written in it is resumed at the epoch's first batch. If it would validate
    every few batches or every few epochs, it also creates an iterator of the validation loader, which draws a number.
    """
    loop = trainer.fit_loop
    if (
        loop.epoch_loop.restarted_on_train_batch_end
        and loop.restarted_mid_epoch
        and loop.epoch_loop.batch_progress.is_last_batch
    ):
        loop.reset_restart_stage()
        loop.epoch_loop.restarting = False


def validation_is_due(trainer: Trainer) -> bool:
    """Return whether Lightning will validate between this training batch and the next."""
    loop = trainer.fit_loop
    return loop._data_fetcher is not None and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def validation_is_complete(trainer: Trainer) -> bool:
    """Return whether the validation that just ended reached its last batch."""
    return trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch


def will_stop(trainer: Trainer) -> bool:
    """Return whether training ends here: `should_stop` is set or `max_steps` is reached."""
    loop = trainer.fit_loop
    reached = loop.max_steps != -1 and trainer.global_step >= loop.max_steps
    return reached or (trainer.should_stop and loop._can_stop_early)


def call_off_validation(trainer: Trainer) -> None:
    """End the running validation from `on_validation_batch_end`, and drop its logs.

    Otherwise means over a part of the data would be logged as means over all of it.

    Raises:
        StopIteration: Always. The evaluation loop treats it as the end of its data and runs its closing hooks.
    """
    trainer.fit_loop.epoch_loop.val_loop._results.clear()
    raise StopIteration
