"""Supervised training of a causal language model: fine-tuning, and the phase before GRPO."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.micro_batches import MergeRules, MicroBatchRules
from lightning_unified.models.causal_lm.labelled_rows import has_values, labelled
from lightning_unified.models.causal_lm.language_model import check_head, head_of, linear_logits
from lightning_unified.nn.linear_cross_entropy import linear_cross_entropy

__all__ = ["SupervisedLanguageModel"]


class SupervisedLanguageModel(LightningModule):
    """Train a causal language model by the mean cross-entropy of labelled tokens.

    `prepare_batch` counts the labels once for the whole batch, before it is split. Losses of micro-batches of any size are divided by
    this number, so they add up. Logits are computed in chunks, at scored positions only, with the model's own scale or cap.

    Shapes:
        Batches: `tokens` (B, S) int64, pads on the right; `labels` (B, S) int64; packed rows also have `positions` (B, S) int64. See
        `labelled_rows.labelled`.

    Args:
        model: A causal language model of transformers, with or without adapters of peft. Weights that require a gradient are trained.

    Attributes:
        policy: The model.
        loss_chunk_rows: Rows of logits that exist at one time; None for the operator's own number.

    Raises:
        ValueError: If the model's head is not a plain linear layer.
    """

    loss_chunk_rows: int | None = None
    loss_name: ClassVar[str] = "train/loss"
    shares: ClassVar[tuple[str, ...]] = ()
    """Names of logged values, besides the loss, that add up over the micro-batches of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        head_of(model)
        self.policy = model
        self._is_checked = False

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Return the model's parameters, without copies of them in other submodules."""
        return self.policy.parameters()

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the batch's active tokens add up."""
        sums = MergeRules(logs=dict.fromkeys((self.loss_name, *self.shares), "sum"))
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch, loss_weight=self.active_tokens, merge=sums)

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch for `training_step`, see `labelled_rows`; a prepared one unchanged.

        Raises:
            ValueError: If the model's logits are not known from its head, see `check_head`; the first batch with values checks this.
        """
        if "total" in batch:
            return dict(batch)
        self._check_head(batch["tokens"])
        return labelled(batch["tokens"], batch["labels"], batch.get("positions"))

    def active_tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the loss weight of a batch: its active tokens, or its rows before it is prepared."""
        return int(batch["total"]) if "total" in batch else len(batch.get("prompt", batch.get("tokens")))

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Tensor:
        if "total" not in batch:
            with torch.no_grad():
                batch = self.prepare_batch(batch)
        return self.compute_loss(batch)

    def compute_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return and log the loss of rows of a prepared batch: their share of the batch's mean."""
        loss = self.cross_entropy(batch)
        self._log({self.loss_name: loss.detach()}, shown=self.loss_name)
        return loss

    def cross_entropy(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the share of prepared rows of labelled tokens in their batch's mean loss."""
        inputs = {"position_ids": batch["positions"]} if "positions" in batch else {}
        logits = linear_logits(self.policy, batch["tokens"], **inputs)
        scored = logits.hidden.gather(1, batch["places"][..., None].expand(-1, -1, logits.hidden.shape[-1]))
        total = linear_cross_entropy(
            scored,
            weight=logits.weight,
            bias=logits.bias,
            labels=batch["targets"],
            reduction="sum",
            chunk_rows=self.loss_chunk_rows,
            transform=logits.transform,
        )
        return total / max(batch["total"], 1)

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        """Log the mean cross-entropy of the labelled tokens."""
        found = labelled(batch["tokens"], batch["labels"], batch.get("positions"))
        self._log({"val/loss": self.cross_entropy(found)}, batch_size=max(found["total"], 1), sync_dist=True)

    @abstractmethod
    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer of the trained parameters, and its schedule."""

    def _check_head(self, tokens: Tensor) -> None:
        if not self._is_checked and has_values(tokens):
            check_head(self.policy)
            self._is_checked = True

    def _log(self, values: Mapping[str, Any], *, shown: str = "", **options: Any) -> None:
        """Log values under a Trainer; `shown` is in the progress bar."""
        if self._trainer is not None:
            for name, value in values.items():
                self.log(name, value, prog_bar=name == shown, **options)
