"""Supervised training of a causal language model, the phase before GRPO."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.grpo.batches.sequences import has_values, supervised
from lightning_unified.models.grpo.language_model import check_head, head_of, score
from lightning_unified.models.grpo.objective import mean_cross_entropy
from lightning_unified.models.grpo.optimizer import Rates, build_optimizer

__all__ = ["SupervisedPolicy"]


class SupervisedPolicy(LightningModule):
    """Train a causal language model by the mean cross-entropy of labelled tokens.

    `prepare_batch` counts the active tokens once for the whole batch, before it is split. Losses of micro-batches of any size are
    divided by this number, so they add up. Log-probabilities are computed in chunks from the last hidden states.

    Shapes:
        Batches: `tokens` (B, S) int64, pads on the right; `labels` (B, S) int64, see `sequences.supervised`.

    Args:
        model: A causal language model of transformers, with or without adapters of peft. Weights that require a gradient are trained.
        rates: Optimizer settings.

    Raises:
        ValueError: If the model's head is not a plain linear layer.
    """

    loss_chunk_rows: int | None = None

    def __init__(self, model: nn.Module, *, rates: Rates) -> None:
        super().__init__()
        head_of(model)
        self.policy = model
        self._rates = rates
        self._is_checked = False

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Return the policy's parameters, without copies of them in other submodules."""
        return self.policy.parameters()

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the batch's active tokens add up."""
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch, loss_weight=self.active_tokens)

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch as `training_step` takes it, see `sequences`; a prepared one unchanged.

        Raises:
            ValueError: If the model's logits are not its hidden states times its head; the first batch with values checks this.
        """
        if "total" in batch:
            return dict(batch)
        self._check_head(batch["tokens"])
        return supervised(batch["tokens"], batch["labels"])

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
        loss = mean_cross_entropy(self.score(batch)[0], batch)
        self._log({"train/sft_loss": loss.detach()}, shown="train/sft_loss")
        return loss

    def score(self, batch: Mapping[str, Any], *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (R, T) of prepared rows' `chosen` tokens, and entropies there."""
        return score(
            self.policy,
            batch["tokens"],
            start=batch["start"],
            chosen=batch["chosen"],
            temperature=temperature,
            chunk=self.loss_chunk_rows,
        )

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        """Log the mean cross-entropy of the labelled tokens."""
        found = supervised(batch["tokens"], batch["labels"])
        loss = mean_cross_entropy(self.score(found)[0], found)
        self._log({"val/loss": loss}, batch_size=max(found["total"], 1))

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and a schedule over the Trainer's estimated steps, see `build_optimizer`."""
        return build_optimizer(self.policy.parameters(), rates=self._rates, trainer=self.trainer)

    def _check_head(self, tokens: Tensor) -> None:
        if not self._is_checked and has_values(tokens):
            check_head(self.policy)
            self._is_checked = True

    def _log(self, values: Mapping[str, Any], *, shown: str = "", **options: Any) -> None:
        """Log values under a Trainer; `shown` is in the progress bar."""
        if self._trainer is not None:
            for name, value in values.items():
                self.log(name, value, prog_bar=name == shown, **options)
