"""The compressor as a LightningModule: policy and reader train on exactly split batches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch import Callback
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.choices import check_choice, check_numbers
from lightning_unified.models.compressor.objective.joint import JointLoss
from lightning_unified.models.compressor.objective.rate import CollapseWatch, KeepRate, Price
from lightning_unified.models.compressor.sizes import check_lengths
from lightning_unified.models.compressor.sizes import preset as preset_config
from lightning_unified.models.compressor.text_codec import TextCodec
from lightning_unified.models.training import EpochSums, check_optimizer_choices, scheduled_adamw

__all__ = ["Compressor"]


class Compressor(TextCodec):
    """A policy that chooses the tokens to keep, and a reader that restores or continues texts.

    The reader is a language model. Both share one loss: the reader's cross-entropy plus the price of kept tokens (see `objective.estimators`). Each part is a sum
    divided by the whole batch's number of terms. `prepare_batch` counts these before the batch is split, and draws the random numbers
    of all masks. Losses and gradients of micro-batches then add up to those of the whole batch. A row holds all masks of a text.

    Shapes:
        A batch is a dict: `input_ids` (B, T) int64, `mask` (B, T) bool, True at tokens; and, for `target="predict"`,
        `continuation` (B, U) int64 and `continuation_mask` (B, U) bool.

    Args:
        preset: A name in `sizes.PRESETS`.
        vocabulary: Token rows; None takes the preset's, as for the next nine.
        positions: The reader's longest sequence: a text twice, or a text and its continuation.
        width: Size of the reader's residual stream.
        layers: The reader's blocks.
        heads: The reader's attention heads; they divide the width.
        feed_forward: Size of the reader's inner layers.
        dropout: Share dropped in the reader.
        text_length: The longest text in tokens.
        window: Tokens that a decision depends on.
        pretrained: Source of GPT-2's weights for the reader, see `network.gpt2`; None takes the preset's.
        load_pretrained: Whether to load pretrained weights; False if a checkpoint follows.
        reading: "infill" or "copy", see `sizes.CompressorConfig`.
        recompute: Activation checkpointing of each block.
        objective: How the policy learns: "reinforce" (sampled decisions, rewards) or "relaxed" (soft decisions, gradients).
        target: Scored tokens: "restore" the dropped ones, or "predict" the continuation.
        keep_ratio: Share of tokens to keep, which the price controls.
        masks: Masks drawn for each text; "reinforce" needs 2 to have a baseline, "relaxed" to show the reader hard ones.
        temperature: Of the relaxed gates.
        entropy_weight: Nats that an undecided token (probability 1/2) is worth, times log 2; see `objective.estimators`.
        budget_range: Largest random shift of a text's log-odds when its masks are drawn, so that policy and reader learn
            budgets on both sides of `keep_ratio`.
        kept_weight: Weight of kept tokens in the restoring loss; dropped ones have 1.
        language_weight: Weight of plain language modelling after a compressed beginning; 0 for none.
        price: First price of a kept token, in nats; None for log V, an untrained reader's cost of a dropped token.
        price_rate: See `rate.Price`.
        price_damping: See `rate.Price`.
        collapse_patience: Collapsed batches in a row before a warning.
        learning_rate: Peak learning rate of the reader, after the warm-up.
        policy_learning_rate: Peak learning rate of the policy.
        weight_decay: AdamW's weight decay for the reader.
        policy_weight_decay: AdamW's weight decay for the policy.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        warmup_steps: Optimizer steps of linear rise from 0.
        schedule: After the warm-up: "linear" or "cosine" to 0 at the last step of the run, or "constant".
        optimizer_kernel: "fused" (no temporaries), "foreach", "forloop", or "auto": fused where torch has it.

    Raises:
        ValueError: If a name is unknown or a number is out of range.
    """

    batch_dims: ClassVar = {"input_ids": 2, "mask": 2}

    def __init__(
        self,
        *,
        preset: str = "compressor-small",
        vocabulary: int | None = None,
        positions: int | None = None,
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        feed_forward: int | None = None,
        dropout: float | None = None,
        text_length: int | None = None,
        window: int | None = None,
        reading: Literal["infill", "copy"] | None = None,
        pretrained: str | None = None,
        load_pretrained: bool = True,
        recompute: bool = False,
        objective: Literal["reinforce", "relaxed"] = "relaxed",
        target: Literal["restore", "predict"] = "restore",
        keep_ratio: float = 0.5,
        masks: int = 2,
        temperature: float = 0.5,
        entropy_weight: float = 1.0,
        budget_range: float = 2.0,
        kept_weight: float = 0.0,
        language_weight: float = 1.0,
        price: float | None = None,
        price_rate: float = 0.2,
        price_damping: float = 5.0,
        collapse_patience: int = 50,
        learning_rate: float = 1e-3,
        policy_learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        policy_weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int = 100,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
    ) -> None:
        betas = (float(betas[0]), float(betas[1]))  # a configuration library's list must not enter the checkpoint
        check_choice("objective", objective, ("reinforce", "relaxed"))
        check_choice("target", target, ("restore", "predict"))
        check_optimizer_choices(schedule=schedule, optimizer_kernel=optimizer_kernel)
        rates = {"learning_rate": learning_rate, "policy_learning_rate": policy_learning_rate, "eps": eps}
        decays = {"weight_decay": weight_decay, "policy_weight_decay": policy_weight_decay}
        check_numbers(positive=rates, not_negative={"warmup_steps": warmup_steps, **decays})
        policy = {"text_length": text_length, "window": window}
        reader = {"vocabulary": vocabulary, "positions": positions, "width": width, "layers": layers, "heads": heads}
        reader |= {"feed_forward": feed_forward, "dropout": dropout}
        config = preset_config(preset, **policy, **reader, reading=reading)
        super().__init__(config, recompute=recompute, load_pretrained=load_pretrained, pretrained=pretrained)
        self.save_hyperparameters()
        self.joint = JointLoss(
            objective=objective,
            target=target,
            masks=masks,
            temperature=temperature,
            entropy_weight=entropy_weight,
            budget_range=budget_range,
            kept_weight=kept_weight,
            language_weight=language_weight,
        )
        start = math.log(config.reader.vocabulary) if price is None else price
        self.price = Price(target=keep_ratio, start=start, rate=price_rate, damping=price_damping)
        self.collapse = CollapseWatch(patience=collapse_patience)
        self._validation = EpochSums(6)  # of `JointLoss.validate`

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "Compressor":
        """Load a checkpoint as Lightning does; a pretrained reader's weights come from it too."""
        return super().load_from_checkpoint(checkpoint_path, *args, **{"load_pretrained": False, **kwargs})

    @override
    def setup(self, stage: str) -> None:
        """Take the data's tokenizer and length, for the checkpoint.

        Raises:
            ValueError: If the data's texts exceed the policy's positions, or lack the continuation to predict.
        """
        data = getattr(self.trainer, "datamodule", None)
        text, continuation = getattr(data, "text_length", None), getattr(data, "continuation_length", None)
        check_lengths(self.config, target=self.hparams["target"], text=text, continuation=continuation)
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            self.attach_tokenizer(tokenizer)
        self.trained_length = getattr(data, "text_length", self.trained_length)

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the whole batch's totals add up."""
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch)

    def prepare_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with its random numbers and totals, see `JointLoss.prepare`."""
        return self.joint.prepare(batch)

    @override
    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int = 0) -> dict[str, Tensor]:
        if "noise" not in batch:
            batch = self.prepare_batch(batch)
        terms = self.joint.terms(self.codec, batch, price=self.price.value)
        if self._trainer is not None:
            self.log("train/loss", terms["loss"].detach(), on_step=True, prog_bar=True)
            self.log("train/distortion", terms["distortion"], on_step=True)
            self.log("train/language_loss", terms["language"], on_step=True)
        return terms

    @override
    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return the callback that moves the price after each batch."""
        return [KeepRate()]

    @override
    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int = 0) -> None:
        self._validation.update(self.joint.validate(self.codec, batch, ratio=self.hparams["keep_ratio"]))

    @override
    def on_validation_epoch_end(self) -> None:
        loss, terms, language, language_terms, kept, tokens = self._validation.compute().tolist()
        self._validation.reset()
        if terms:
            self.log("val/loss", loss / terms, prog_bar=True, sync_dist=True)
        if tokens:
            self.log("val/keep_ratio", kept / tokens, sync_dist=True)
            self.log("val/language_loss", language / language_terms, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW with two groups, policy and reader, and its schedule.

        The mask's embedding and the separator are in the reader's group.

        Raises:
            ValueError: If the schedule falls to 0 and the run has no end.
        """
        given, policy = self.hparams, list(self.codec.policy.parameters())
        own = {id(parameter) for parameter in policy}
        reader = [parameter for parameter in self.codec.parameters() if id(parameter) not in own]
        groups = [
            {"params": policy, "lr": given["policy_learning_rate"], "weight_decay": given["policy_weight_decay"]},
            {"params": reader, "lr": given["learning_rate"], "weight_decay": given["weight_decay"]},
        ]
        return scheduled_adamw(groups, hparams=given, trainer=self.trainer)
