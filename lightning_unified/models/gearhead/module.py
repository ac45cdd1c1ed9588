"""GearHead as a LightningModule: exact splitting, AdamW with warm-up, complete checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from tokenizers import Tokenizer
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.data.documents.record import BOS_ID, EOS_ID, PAD_ID
from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.choices import check_numbers
from lightning_unified.models.gearhead.diagnoser import write_samples
from lightning_unified.models.gearhead.network import GearHeadNetwork
from lightning_unified.models.gearhead.objective import loss_sums, mean_loss, with_totals
from lightning_unified.models.gearhead.sizes import preset as preset_config
from lightning_unified.models.plain_checkpoint import check_same_sizes, check_vocabulary
from lightning_unified.models.training import EpochSums, check_optimizer_choices, decay_groups, scheduled_adamw

__all__ = ["GearHead"]


class GearHead(LightningModule):
    """A language model for equipment diagnostics.

    The preset `gearhead-text` makes it one of plain text. The loss is the next token's cross-entropy plus `diagnosis_weight`
    times that of the subsystem. Each is a sum divided by the whole batch's number of terms, which `prepare_batch` counts
    before the batch is split. The losses and the gradients of the micro-batches then add up to those of the whole batch.

    `loss_chunk_rows` may be set at any time: the tokens of a chunk of the loss; None chooses.

    Shapes:
        A batch is a dict: `input_ids`, `labels` (not shifted: `labels[:, t]` is the token at t), `error_code_ids` and
        `diagnosis_labels`, all (B, T) int64; -100 in labels is not scored. The last two may be absent.

    Args:
        preset: A name in `sizes.PRESETS`.
        vocabulary: Token rows; None takes the preset's, as for the next five.
        positions: The longest text in tokens.
        width: Size of the residual stream.
        layers: Number of blocks.
        heads: Attention heads; they divide the width.
        feed_forward: Size of a block's inner layer.
        dropout: Share dropped; None takes the preset's.
        recompute: Activation checkpointing of each block.
        learning_rate: Peak learning rate, after the warm-up.
        weight_decay: AdamW's weight decay, except for biases and layer norms.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        warmup_steps: Optimizer steps of linear rise from 0.
        schedule: After the warm-up: "linear" or "cosine" to 0 at the last step of the run, or "constant".
        optimizer_kernel: "fused" (no temporaries), "foreach", "forloop", or "auto": fused where torch has it.
        diagnosis_weight: Weight of the subsystem's loss, if there is a diagnostic head.

    Raises:
        ValueError: If a name is unknown or a number is out of range.
    """

    loss_chunk_rows: int | None = None

    batch_dims: ClassVar = {"input_ids": 2, "labels": 2}

    def __init__(
        self,
        *,
        preset: str = "gearhead-small",
        vocabulary: int | None = None,
        positions: int | None = None,
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        feed_forward: int | None = None,
        dropout: float | None = None,
        recompute: bool = False,
        learning_rate: float = 5e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int = 100,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
        diagnosis_weight: float = 0.1,
    ) -> None:
        super().__init__()
        betas = (float(betas[0]), float(betas[1]))  # a configuration library's list must not enter the checkpoint
        check_optimizer_choices(schedule=schedule, optimizer_kernel=optimizer_kernel)
        check_numbers(
            positive={"learning_rate": learning_rate, "eps": eps},
            not_negative={
                "warmup_steps": warmup_steps,
                "weight_decay": weight_decay,
                "diagnosis_weight": diagnosis_weight,
            },
        )
        self.save_hyperparameters()
        self.config = preset_config(
            preset,
            vocabulary=vocabulary,
            positions=positions,
            width=width,
            layers=layers,
            heads=heads,
            feed_forward=feed_forward,
            dropout=dropout,
        )
        self.network = GearHeadNetwork(self.config, recompute=recompute)
        self.tokenizer: Tokenizer | None = None
        self._validation = EpochSums(5)  # loss, tokens, diagnosis loss, diagnoses, right diagnoses

    @property
    def recompute(self) -> bool:
        """Whether each block recomputes its activations; a strategy may set it before the run."""
        return self.network.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.network.recompute = bool(value)

    def recompute_blocks(self) -> list[nn.Module]:
        """Return the blocks, for activation checkpointing of some of them."""
        return list(self.network.blocks)

    @override
    def setup(self, stage: str) -> None:
        """Take the data's tokenizer, for the checkpoint."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is not None:
            self.attach_tokenizer(tokenizer)

    def attach_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Set this model's tokenizer; with fewer tokens than the vocabulary, some rows stay unused.

        Raises:
            ValueError: If it has more tokens than the model has rows, or its special tokens have other ids than in `documents.record`.
        """
        trained = None if self.tokenizer is None else self.tokenizer.get_vocab()
        check_vocabulary(tokenizer.get_vocab(), rows=self.config.vocabulary, trained=trained)
        for token, row in (("<pad>", PAD_ID), ("<s>", BOS_ID), ("</s>", EOS_ID)):
            if tokenizer.token_to_id(token) != row:
                raise ValueError(f"{token} has id {tokenizer.token_to_id(token)} in this tokenizer; it must be {row}.")
        self.tokenizer = tokenizer

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the whole batch's totals add up."""
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch)

    def prepare_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with its numbers of loss terms, see `objective.with_totals`."""
        return with_totals(batch)

    @override
    def forward(self, input_ids: Tensor, error_code_ids: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V); training computes them in chunks instead."""
        return self.network.logits(self.network(input_ids, error_code_ids))

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int = 0) -> Tensor:
        if "scored_tokens" not in batch:
            batch = self.prepare_batch(batch)
        weight = self.hparams["diagnosis_weight"]
        loss = mean_loss(self.network, batch, diagnosis_weight=weight, chunk_rows=self.loss_chunk_rows)
        if self._trainer is not None:
            self.log("train/loss", loss.detach(), on_step=True, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int = 0) -> None:
        sums, totals = loss_sums(self.network, batch, chunk_rows=self.loss_chunk_rows), with_totals(batch)
        losses = (sums["loss"], totals["scored_tokens"], sums["diagnosis_loss"], totals["scored_diagnoses"])
        self._validation.update(torch.stack([term.float() for term in (*losses, sums["right"])]))

    @override
    def on_validation_epoch_end(self) -> None:
        loss, tokens, diagnosis_loss, diagnoses, right = self._validation.compute().tolist()
        self._validation.reset()
        if tokens:
            self.log("val/loss", loss / tokens, prog_bar=True, sync_dist=True)
            perplexity = math.exp(min(loss / tokens, 700.0))  # exp(710) overflows a float
            self.log("val/perplexity", perplexity, sync_dist=True)
        if diagnoses and self.network.diagnostic_head is not None:
            self.log("val/diagnosis_loss", diagnosis_loss / diagnoses, sync_dist=True)
            self.log("val/diagnosis_accuracy", right / diagnoses, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and its schedule, one value per step, for the Trainer's estimated steps.

        Raises:
            ValueError: If the schedule falls to 0 and the run has no end.
        """
        groups = decay_groups(self.network.parameters(), weight_decay=self.hparams["weight_decay"])
        return scheduled_adamw(groups, hparams=self.hparams, trainer=self.trainer)

    def write_samples(self, *, seed: int) -> list[str]:
        """Return texts of the trained model, for a person to look at; none without a tokenizer."""
        return [] if self.tokenizer is None else write_samples(self.network, tokenizer=self.tokenizer, seed=seed)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the sizes and the tokenizer beside the weights, so that inference needs one file."""
        text = None if self.tokenizer is None else self.tokenizer.to_str()
        checkpoint["gearhead"] = {"config": asdict(self.config), "tokenizer": text}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer.

        Raises:
            ValueError: If the checkpoint belongs to another model, or its sizes or tokenizer differ.
        """
        saved = checkpoint.get("gearhead")
        if saved is None:
            raise ValueError("this checkpoint is not one of GearHead: it holds no sizes and no tokenizer.")
        check_same_sizes(saved["config"], asdict(self.config))
        if saved["tokenizer"] is not None:
            given, self.tokenizer = self.tokenizer, Tokenizer.from_str(saved["tokenizer"])
            if given is not None:
                self.attach_tokenizer(given)
