"""Silence what a user cannot act on; everything else is shown."""

import logging
import warnings

__all__ = ["quiet_third_parties"]

_NOT_ACTIONABLE = (
    "The '.*_dataloader' does not have many workers",  # hardware decides the workers, and says why
    "The number of training batches .* is smaller than the logging interval",
    "Checkpoint directory .* exists and is not empty",  # a resumed run continues in its own directory
    "You're resuming from a checkpoint that ended before",  # the loader's position is restored
    "Trying to infer the `batch_size`",
    "Experiment logs directory .* exists",
    "isinstance\\(treespec, LeafSpec\\)",
    "`isinstance\\(treespec",
    "Found .* module\\(s\\) in eval mode",
    "There is a wandb run already",
    "Starting from v1.9.0",
)


def quiet_third_parties() -> None:
    """Lower Lightning's banners and tips to warnings, and drop the warnings that a user cannot act on."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in _NOT_ACTIONABLE:
        warnings.filterwarnings("ignore", message=f".*{pattern}")
