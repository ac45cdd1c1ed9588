"""The compressor as a LightningModule: policy and reader train on exactly split batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from tokenizers import Tokenizer
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.choices import check_choice
from lightning_unified.models.compressor.network.codec import Codec
from lightning_unified.models.compressor.objective.joint import JointLoss
from lightning_unified.models.compressor.objective.rate import CollapseWatch, KeepRate, Price
from lightning_unified.models.compressor.optimizer import build_optimizer
from lightning_unified.models.compressor.presets import preset as preset_config
from lightning_unified.models.compressor.tokenizer import TextTokenizer
from lightning_unified.models.epoch_sums import EpochSums

__all__ = ["Compressor"]

_CHOICES = {
    "objective": ("reinforce", "relaxed"),
    "target": ("restore", "predict"),
    "schedule": ("linear", "cosine", "constant"),
    "optimizer_kernel": ("auto", "fused", "foreach", "forloop"),
}


class Compressor(LightningModule):
    """A policy that chooses the tokens to keep, and a reader of the kept tokens.

    The reader is a language model that restores or continues the text.

    The reader is a language model.

    Both share one loss: the reader's cross-entropy plus the price of kept tokens (see `objective.estimators`). Each part is a sum
    divided by the whole batch's number of terms. `prepare_batch` counts these before the batch is split, and draws the random numbers
    of all masks. Losses and gradients of micro-batches then add up to those of the whole batch. A row holds all masks of a text.

    `trained_steps` is the number of training steps of the loaded checkpoint, else 0. `trained_length` is the text length in training,
    None if unknown.

    Shapes:
        A batch is a dict: `input_ids` (B, T) int64, `mask` (B, T) bool, True at tokens; and, for `target="predict"`,
        `continuation` (B, U) int64 and `continuation_mask` (B, U) bool.

    Args:
        preset: A name in `presets.PRESETS`.
        vocabulary: Token rows; None takes the preset's, as for the next nine.
        positions: The reader's longest sequence: a text twice, or a text and its continuation.
        width: Size of the reader's residual stream.
        layers: The reader's blocks.
        heads: The reader's attention heads; they divide the width.
        feed_forward: Size of the reader's inner layers.
        dropout: Share dropped in the reader.
        text_length: The longest text in tokens.
        window: Tokens that a decision depends on.
        load_pretrained: Whether to load a preset's pretrained reader; False if a checkpoint follows.
        reading: "infill" or "copy", see `presets.CompressorConfig`.
        recompute: Activation checkpointing of each block.
        objective: How the policy learns: "reinforce" (sampled decisions, rewards) or "relaxed" (soft decisions, gradients).
        target: Scored tokens: "restore" the dropped ones, or "predict" the continuation.
        keep_ratio: Share of tokens to keep, which the price controls.
        masks: Masks drawn for each text; "reinforce" needs 2 to have a baseline, "relaxed" to show the reader hard ones.
        temperature: Of the relaxed gates.
        entropy_weight: Nats that an undecided token (probability 1/2) is worth, times log 2; see `objectives`.
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

    trained_steps: int = 0
    trained_length: int | None = None

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
        super().__init__()
        betas = (float(betas[0]), float(betas[1]))  # a configuration library's list must not enter the checkpoint
        self.save_hyperparameters()
        given = {"objective": objective, "target": target, "schedule": schedule, "optimizer_kernel": optimizer_kernel}
        for name, choice in given.items():
            check_choice(name, choice, _CHOICES[name])
        _check_numbers(
            above={"learning_rate": learning_rate, "policy_learning_rate": policy_learning_rate, "eps": eps},
            least={
                "warmup_steps": warmup_steps,
                "weight_decay": weight_decay,
                "policy_weight_decay": policy_weight_decay,
            },
        )
        self.config = preset_config(
            preset,
            vocabulary=vocabulary,
            positions=positions,
            width=width,
            layers=layers,
            heads=heads,
            feed_forward=feed_forward,
            dropout=dropout,
            text_length=text_length,
            window=window,
            reading=reading,
        )
        self.codec = Codec(self.config, recompute=recompute, load_pretrained=load_pretrained)
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
        start = math.log(self.config.reader.vocabulary) if price is None else price
        self.price = Price(target=keep_ratio, start=start, rate=price_rate, damping=price_damping)
        self.collapse = CollapseWatch(patience=collapse_patience)
        self.tokenizer: TextTokenizer | None = None
        # loss, its terms, language loss, its terms, tokens the policy would keep, tokens
        self._validation = EpochSums(6)

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> "Compressor":
        """Load a checkpoint as Lightning does; a pretrained reader's weights come from it too."""
        return super().load_from_checkpoint(checkpoint_path, *args, **{"load_pretrained": False, **kwargs})

    @property
    def recompute(self) -> bool:
        """Whether each block recomputes its activations; a strategy may set it before the run."""
        return self.codec.reader.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.codec.reader.recompute = bool(value)

    @property
    def loss_chunk_rows(self) -> int | None:
        """Tokens of a chunk of the loss; None chooses."""
        return self.codec.loss_chunk_rows

    @loss_chunk_rows.setter
    def loss_chunk_rows(self, value: int | None) -> None:
        self.codec.loss_chunk_rows = value

    def recompute_blocks(self) -> list[nn.Module]:
        """Return the reader's blocks, for activation checkpointing of some of them."""
        return self.codec.reader.layers()

    @property
    def text_length(self) -> int:
        """The longest text with trained positions; before training, with positions at all."""
        return min(self.trained_length or self.config.policy.positions, self.config.policy.positions)

    @override
    def setup(self, stage: str) -> None:
        """Take the data's tokenizer and length, for the checkpoint.

        Raises:
            ValueError: If the data's texts exceed the policy's positions, or lack the continuation to predict.
        """
        data = getattr(self.trainer, "datamodule", None)
        self._check_lengths(
            text=getattr(data, "text_length", None), continuation=getattr(data, "continuation_length", None)
        )
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            self.attach_tokenizer(tokenizer)
        self.trained_length = getattr(data, "text_length", self.trained_length)

    def _check_lengths(self, *, text: int | None, continuation: int | None) -> None:
        longest, positions = self.config.policy.positions, self.config.reader.positions
        if text is not None and text > longest:
            raise ValueError(
                f"data.text_length={text}, and the policy has positions for {longest} tokens; lower it, or set "
                f"model.text_length={text} (the reader then needs {2 * text} positions and has {positions}: model.positions)."
            )
        if self.hparams["target"] != "predict" or continuation is None:
            return
        if not continuation:
            raise ValueError(
                "model.target=predict scores the continuation of each text; set data.continuation_length above 0."
            )
        if positions < (text or 0) + continuation:
            raise ValueError(
                f"data.text_length={text} and data.continuation_length={continuation} need {(text or 0) + continuation} positions, "
                f"and the reader has {positions}; lower them or raise model.positions."
            )

    def attach_tokenizer(self, tokenizer: Tokenizer | TextTokenizer) -> None:
        """Set this model's tokenizer; with fewer tokens than the vocabulary, some rows stay unused.

        Raises:
            ValueError: If it has more tokens than the model has rows, or the model was trained with another one.
        """
        given = tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer(tokenizer)
        if len(given) > self.config.reader.vocabulary:
            raise ValueError(
                f"the tokenizer has {len(given):,} tokens, the model's vocabulary is {self.config.reader.vocabulary:,}; train the "
                f"tokenizer with at most that many or set the model's vocabulary={len(given)}."
            )
        if self.config.pretrained is not None and len(given) != self.config.reader.vocabulary:
            raise ValueError(
                f"{self.config.pretrained} has {self.config.reader.vocabulary:,} tokens of its own, the tokenizer given {len(given):,}; "
                f"set data.pretrained={self.config.pretrained}."
            )
        if self.tokenizer is not None and self.tokenizer != given:
            raise ValueError(
                f"this model was trained with another tokenizer ({len(self.tokenizer):,} tokens) than the one given "
                f"({len(given):,} tokens); its weights mean nothing under the new one. Use the tokenizer of the checkpoint."
            )
        self.tokenizer = given

    def keep_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the log-odds (B, T) of keeping each token of `ids` (B, T).

        `mask` (B, T) is True at tokens and False at pads.
        """
        return self.codec(ids, mask)

    def reconstruct(self, ids: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
        """Return the logits (B, T, V) of every original token, given the kept ones.

        Shapes:
            ids (B, T); keep (B, T), bool or gates in [0, 1]; mask (B, T) bool.
        """
        embeddings = self.codec.reader.embed(ids)
        return self.codec.scores(self.codec.restored(embeddings, gates=keep.to(embeddings.dtype), mask=mask))

    def next_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the reader's next-token logits (B, T, V) as a language model of the whole text."""
        return self.codec.next_logits(ids, mask)

    def continue_logits(
        self, ids: Tensor, keep: Tensor, mask: Tensor, continuation: Tensor, continuation_mask: Tensor
    ) -> Tensor:
        """Return the logits (B, U, V) of the continuation.

        Each token is predicted from the kept tokens and the continuation before it.

        The reader gets the kept tokens (`keep` above 0.5) side by side and no slots for the others, so it reads fewer slots.

        Shapes:
            ids, keep, mask (B, T); continuation, continuation_mask (B, U).
        """
        embeddings = self.codec.reader.embed(ids)
        hidden = self.codec.continued(
            embeddings, real=mask & (keep > 0.5), continuation=continuation, continuation_mask=continuation_mask
        )
        return self.codec.scores(hidden)

    @override
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return `keep_logits(ids, mask)`."""
        return self.keep_logits(ids, mask)

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
            self.log("val/loss", loss / terms, prog_bar=True)
        if tokens:
            self.log("val/keep_ratio", kept / tokens)
            self.log("val/language_loss", language / language_terms)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW with two groups, policy and reader, and its schedule.

        The schedule covers the Trainer's estimated steps.

        Raises:
            ValueError: If the schedule falls to 0 and the run has no end.
        """
        given, schedule, total = self.hparams, self.hparams["schedule"], self.trainer.estimated_stepping_batches
        if schedule != "constant" and not math.isfinite(total):
            raise ValueError(
                f"schedule={schedule!r} needs to know the last step; set max_steps or max_epochs, or schedule=constant."
            )
        return build_optimizer(self.codec, hparams=given, total_steps=total, precision=self.trainer.precision)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the sizes and the tokenizer beside the weights, so that compressing needs one file."""
        text = None if self.tokenizer is None else self.tokenizer.to_str()
        sizes = {"config": asdict(self.config), "trained_length": self.trained_length}
        checkpoint["compressor"] = {**sizes, "tokenizer": text}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer.

        Raises:
            ValueError: If the checkpoint belongs to another model, or its sizes or tokenizer differ.
        """
        saved = checkpoint.get("compressor")
        if saved is None:
            raise ValueError("this checkpoint is not one of Compressor: it holds no sizes and no tokenizer.")
        if other := _differences(saved["config"], asdict(self.config)):
            raise ValueError(
                f"the checkpoint has other sizes: {', '.join(other)}. Build the model with the checkpoint's."
            )
        self.trained_steps = int(checkpoint.get("global_step", 0))
        self.trained_length = self.trained_length or saved["trained_length"]
        if saved["tokenizer"] is not None:
            given, self.tokenizer = self.tokenizer, TextTokenizer.from_str(saved["tokenizer"])
            if given is not None:
                self.attach_tokenizer(given)


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in own.items():
        if isinstance(value, Mapping):
            found += _differences(saved.get(key, {}), value)
        elif key != "dropout" and saved.get(key) != value:
            found.append(f"{key} {saved.get(key)} (here {value})")
    return found


def _check_numbers(*, above: Mapping[str, float], least: Mapping[str, float]) -> None:
    for name, value in above.items():
        if value <= 0:
            raise ValueError(f"{name}={value} must be above 0.")
    for name, value in least.items():
        if value < 0:
            raise ValueError(f"{name}={value} may not be below 0.")
