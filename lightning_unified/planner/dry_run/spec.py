"""The step to trace: a module, a batch, and the settings of the fit."""

from dataclasses import dataclass
from typing import Any

import lightning as L

from lightning_unified.errors import DryRunError
from lightning_unified.options import KERNELS
from lightning_unified.planner.ranks.sharded_copy import Sharding

__all__ = ["StepSize", "StepSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """The step to trace, apart from its size and the blocks that recompute their activations.

    Attributes:
        module: Any module, which stays unchanged; its parameters may be on the meta device.
        batch: A batch as `training_step` gets it, or `validation_step` if `validates`.
        backend: The backend whose kernels are meant: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`.
        precision: Lightning's name.
        trainer: The live Trainer, with the settings that the module reads, its callbacks, clipping and accumulation; None for a default
            Trainer.
        optimizer_kernel: `"fused"`, `"foreach"` or `"for-loop"`; None for the optimizers' own choice on `backend`.
        loss_chunk: Rows of logits that the chunked loss computes at a time, if the module offers one; None leaves the module as it is.
        attention: `"chunked"` computes attention in chunks of queries; None leaves it to torch.
        length: Positions of a row; None for as many as in `batch`.
        accumulate: Batches in an accumulation window; None for the Trainer's.
        clip: The norm for gradient clipping; None for the Trainer's.
        validates: Whether to trace a validation step in the middle of a fit: optimizer state exists then, and gradients do not.
        train_batch: A batch as `training_step` gets it, if a validation batch differs in structure; the dry run trains on it first.
        is_prepared: Whether the rule `prepare` has been applied to training batches already.
        sharding: How parameters, gradients and optimizer state are divided over ranks; None trains the whole module on the device.
        optimizer_rollback: Whether the strategy copies weights and optimizer state around each step; None for the option of the Trainer's
            strategy, and without one for the default of `unified_fsdp`, which copies, and of the others, which do not.
        whole_chunks: Whether a shorter last part of a chunked loss counts as its share of a whole one, so that steps of different sizes run the
            same operations.
        compiled: Whether compiled parts of the module run as compiled code; on a simulated machine they run uncompiled.

    Raises:
        DryRunError: If the optimizer kernel is unknown.
    """

    module: L.LightningModule
    batch: Any
    backend: str = "cpu"
    precision: str = "32-true"
    trainer: L.Trainer | None = None
    optimizer_kernel: str | None = None
    loss_chunk: int | None = None
    attention: str | None = None
    length: int | None = None
    accumulate: int | None = None
    clip: float | None = None
    validates: bool = False
    train_batch: Any = None
    is_prepared: bool = False
    whole_chunks: bool = False
    compiled: bool = True
    sharding: Sharding | None = None
    optimizer_rollback: bool | None = None

    def __post_init__(self) -> None:
        if self.optimizer_kernel is not None and self.optimizer_kernel not in KERNELS:
            raise DryRunError(f"optimizer_kernel={self.optimizer_kernel!r}: give one of {', '.join(KERNELS)}, or None.")

    def trainer_settings(self) -> dict[str, Any]:
        """Return the dry run's Trainer arguments, from this step and the live Trainer."""
        live = self.trainer
        settings: dict[str, Any] = {"val_check_interval": 1} if self.validates else {"limit_val_batches": 0}
        if not self.module.automatic_optimization:
            return settings
        window = self.accumulate or (1 if live is None else live.accumulate_grad_batches)
        settings["accumulate_grad_batches"] = min(window, 2)  # the third batch of a window runs as the second does
        norm = self.clip if self.clip is not None else getattr(live, "gradient_clip_val", None)
        if norm is not None:
            settings["gradient_clip_val"] = norm
            settings["gradient_clip_algorithm"] = getattr(live, "gradient_clip_algorithm", None)
        return settings


@dataclass(frozen=True, slots=True)
class StepSize:
    """The micro-batches of a step.

    Attributes:
        rows: Rows of the first micro-batch.
        num_micro_batches: The number of micro-batches.
        later_rows: Rows of every micro-batch but the first.
        length: Positions of a row; None for the step's own.
    """

    rows: int
    num_micro_batches: int
    later_rows: int
    length: int | None = None

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of the first micro-batch; None for a step that is not split."""
        return None if self.num_micro_batches == 1 else self.rows
