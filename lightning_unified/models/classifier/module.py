"""The classifier as a LightningModule: exact splits, calibration, complete checkpoints."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.classifier.data.identity import Identity
from lightning_unified.models.classifier.evaluation.report import Outputs, Report, report
from lightning_unified.models.classifier.evaluation.temperature import fit_temperature
from lightning_unified.models.classifier.network import trimming
from lightning_unified.models.classifier.network.network import build_network
from lightning_unified.models.classifier.training.hyperparameters import check_hyperparameters
from lightning_unified.models.classifier.training.objective import ClassificationLoss
from lightning_unified.models.classifier.training.objective import class_weights as weights_of
from lightning_unified.models.classifier.training.optimizer import build_optimizer
from lightning_unified.models.pretrained.recompute_switch import RecomputeSwitch

__all__ = ["TextClassifier"]

_TOTAL = "total_weight"
_ON_BAR = {"loss", "accuracy", "macro_f1"}


class TextClassifier(RecomputeSwitch, LightningModule):
    """Fine-tune an encoder of transformers as a sequence classifier.

    The loss is the mean cross-entropy over the batch, weighted by class: a sum divided by the whole batch's weight. `prepare_batch`
    counts that weight before the batch is split, so losses and gradients of micro-batches add up to those of the whole batch.
    Micro-batches with short rows drop padding down to one of the data's fixed lengths, which changes no prediction.

    `setup` takes label names, tokenizer, lengths and class counts from the data module, and the checkpoint holds them. After each
    validation, the temperature is fitted; `predict_step` returns scaled probabilities.

    `report` is that of the last validation or test, None before the first.

    Shapes:
        A batch is a dict: `input_ids` (B, T) int64, `attention_mask` (B, T) bool or int64, `labels` (B) int64.

    Args:
        preset: A name in `presets.PRESETS`.
        encoder: A folder, an installed package or a hub id, in place of the preset's encoder.
        architecture: A transformers configuration, in place of the encoder's own: without `encoder`, weights are random.
        load_pretrained: Whether to load the encoder's weights; False if a checkpoint follows.
        labels: Number of labels; None takes the data's.
        dropout: Dropout in place of the encoder's own.
        attention: Attention kernel, as transformers names it: "sdpa" or "eager".
        recompute: Activation checkpointing of each block.
        lora_rank: Inner size of low-rank adapters; only they and the head are trained. None trains all weights.
        lora_alpha: An adapter's product is multiplied by `lora_alpha / lora_rank`.
        lora_dropout: Share dropped before an adapter.
        lora_targets: Last names of the layers with adapters; None for all linear layers.
        label_smoothing: Share of a label's weight that is spread over all classes.
        class_weights: "none", "balanced" (each class has the same total weight), or one weight for each label.
        calibrate: Fit a temperature after each validation.
        calibration_bins: Bins of confidence for the calibration error.
        learning_rate: Peak learning rate, after the warm-up.
        weight_decay: AdamW's weight decay, except for biases and layer norms.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        warmup_share: Share of the run's steps in which the rate rises from 0.
        schedule: After the warm-up: "linear" or "cosine" to 0 at the last step of the run, or "constant".
        optimizer_kernel: "fused" (no temporaries), "foreach", "forloop", or "auto": fused where torch has it.

    Raises:
        FileNotFoundError: If the encoder is not found.
        RuntimeError: If a library is missing, or the encoder's files do not fit together.
        ValueError: If a name is unknown or a number is out of range.
    """

    temperature: Tensor
    batch_dims: ClassVar = {"input_ids": 2, "attention_mask": 2, "labels": 1}

    def __init__(
        self,
        *,
        preset: str = "classifier-minilm",
        encoder: str | None = None,
        architecture: Mapping[str, Any] | None = None,
        load_pretrained: bool = True,
        labels: int | None = None,
        dropout: float | None = None,
        attention: Literal["sdpa", "eager"] = "sdpa",
        recompute: bool = False,
        lora_rank: int | None = None,
        lora_alpha: float = 16.0,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[str] | None = None,
        label_smoothing: float = 0.0,
        class_weights: Literal["none", "balanced"] | Sequence[float] = "none",
        calibrate: bool = True,
        calibration_bins: int = 15,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup_share: float = 0.06,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
    ) -> None:
        super().__init__()
        # lists and mappings of a configuration library must not enter the checkpoint
        betas = (float(betas[0]), float(betas[1]))
        class_weights = class_weights if isinstance(class_weights, str) else [float(weight) for weight in class_weights]
        lora_targets = None if lora_targets is None else [str(name) for name in lora_targets]
        architecture = None if architecture is None else dict(architecture)
        self.save_hyperparameters()
        check_hyperparameters(locals())
        self.network = build_network(self.hparams)
        self.recompute = recompute
        self.identity = Identity()
        self.report: Report | None = None
        self.register_buffer("temperature", torch.ones(()))
        known = None if isinstance(class_weights, str) else class_weights
        weights = None if known is None else weights_of(known, labels=labels or len(known), counts=None)
        self.objective = ClassificationLoss(smoothing=label_smoothing, weights=weights)
        self._outputs = Outputs()

    @override
    def recompute_blocks(self) -> list[nn.Module]:
        return self.network.blocks()

    @property
    def label_names(self) -> list[str]:
        """The names of the classes; their numbers before data names them."""
        return self.identity.label_names or [str(index) for index in range(self.network.labels)]

    @override
    def setup(self, stage: str) -> None:
        """Take label names, tokenizer, lengths and class counts from the data; see `Identity.take`."""
        # Lightning warns that the module's hook replaces the data's, which is intended
        warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer`")
        if (data := getattr(self.trainer, "datamodule", None)) is None:
            return
        self.identity.take(data, self.network, labels=self.hparams["labels"])
        counts = getattr(data, "class_counts", None)
        weights = weights_of(self.hparams["class_weights"], labels=self.network.labels, counts=counts)
        self.objective.weights = None if weights is None else weights.to(self.device)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count the rows' lengths on the CPU, before the batch is transferred."""
        return trimming.with_row_lengths(batch)

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the whole batch's class weights add up."""
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch)

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with `total_weight`, the sum (a scalar) of its rows' class weights."""
        return {**batch, _TOTAL: self.objective.total_weight(batch["labels"])}

    @override
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) of texts (B, T); without a mask there are no pads."""
        return self.network(input_ids, attention_mask)

    def batch_logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits (B, C) of a batch, without padding that no row needs."""
        part = trimming.trimmed(batch, lengths=self.identity.lengths)
        return self.network(part["input_ids"], trimming.padded_mask(part))

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Tensor:
        if _TOTAL not in batch:
            batch = self.prepare_batch(batch)
        loss = self.objective(self.batch_logits(batch), batch["labels"], total=batch[_TOTAL])
        if self._trainer is not None:
            self.log("train/loss", loss.detach(), on_step=True, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        self._outputs.update(self.batch_logits(batch), batch["labels"])

    @override
    def test_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        self._outputs.update(self.batch_logits(batch), batch["labels"])

    @override
    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Tensor:
        """Return the probabilities (B, C), scaled by the temperature."""
        return self.probabilities(self.batch_logits(batch))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (B, C): the softmax of logits (B, C) divided by the temperature."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        return (scores / self.temperature.to(scores.dtype)).softmax(-1)

    @override
    def on_validation_epoch_end(self) -> None:
        self._report("val", calibrate=self.hparams["calibrate"] and not self.trainer.sanity_checking)

    @override
    def on_test_epoch_end(self) -> None:
        self._report("test", calibrate=False)

    def _report(self, stage: str, *, calibrate: bool) -> None:
        logits, labels = self._outputs.compute()
        self._outputs.reset()
        if calibrate:
            self.temperature.fill_(fit_temperature(logits, labels))
        scale = float(self.temperature) if self.hparams["calibrate"] else None
        bins = self.hparams["calibration_bins"]
        self.report = report(logits, labels, label_names=self.label_names, temperature=scale, bins=bins)
        for name, value in self.report.figures().items():
            self.log(f"{stage}/{name}", value, prog_bar=name in _ON_BAR, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and its schedule for the Trainer's estimated steps; see `build_optimizer`."""
        return build_optimizer(self.network, hparams=self.hparams, trainer=self.trainer)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save architecture, label names and tokenizer beside the weights: one file is enough."""
        own = {"architecture": self.network.architecture(), "load_pretrained": False, "labels": self.network.labels}
        checkpoint["hyper_parameters"] = {**checkpoint.get("hyper_parameters", {}), **own}
        checkpoint["classifier"] = {**self.identity.state(), "label_names": self.label_names}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore label names and tokenizer; see `Identity.restore`."""
        self.identity.restore(checkpoint.get("classifier"), self.network)
