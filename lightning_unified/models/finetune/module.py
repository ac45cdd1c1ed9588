"""Supervised fine-tuning of a causal language model, as a LightningModule."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from typing_extensions import override

from lightning_unified.models.causal_lm.checkpoint import FrozenWeights
from lightning_unified.models.causal_lm.choice import language_model_of
from lightning_unified.models.causal_lm.own_tokenizer import OwnTokenizer
from lightning_unified.models.causal_lm.supervised import SupervisedLanguageModel
from lightning_unified.models.choices import check_numbers
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.models.pretrained.architecture import blocks_of
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.pretrained.recompute_switch import RecomputeSwitch
from lightning_unified.models.training import check_optimizer_choices, decay_groups, scheduled_adamw

__all__ = ["Finetune"]

_DATA = ("path", "template", "loss_on", "prompts", "sequence_length", "too_long", "val_fraction", "seed")
_SAMPLES, _SAMPLE_TOKENS = 3, 64  # of a run: to look at, in seconds


class Finetune(RecomputeSwitch, SupervisedLanguageModel):
    """Train a causal language model on labelled tokens: adapters (LoRA or DoRA), or all weights.

    The loss is the mean cross-entropy of the scored tokens of the whole batch. The tokenizer comes from the data module (`FinetuneData`)
    when a fit begins. A checkpoint holds it, and leaves out frozen weights that come from a file.

    Args:
        preset: A name in `finetune.presets.PRESETS`.
        pretrained: Source of the weights, in place of the preset's; see `causal_lm.weights.find_language_model`.
        architecture: A transformers configuration, in place of the preset's or of the file's; the weights are random then.
        load_pretrained: Read the weights; False keeps random ones, if a checkpoint follows. On the meta device none are read.
        dtype: Dtype of the weights, "float32" or "bfloat16"; adapters are float32.
        attention: "sdpa" or "eager".
        recompute: Activation checkpointing of each block.
        lora_rank: Inner size of adapters; None trains all weights.
        lora_alpha: See `pretrained.adapters`.
        lora_dropout: See `pretrained.adapters`.
        lora_targets: Last names of the layers with adapters; None for all linear layers but the head.
        dora: Whether the adapters are DoRA.
        learning_rate: Peak learning rate.
        weight_decay: AdamW's weight decay, of matrices.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        warmup_steps: Optimizer steps of linear rise from 0.
        schedule: After the warm-up: "linear" or "cosine" to 0 at the last step, or "constant".
        optimizer_kernel: "fused" (no temporaries), "foreach", "forloop", or "auto": fused where torch has it.

    Raises:
        FileNotFoundError: If the weights are not found.
        RuntimeError: If transformers or peft is not installed.
        ValueError: If a name is unknown, a number is out of range, or the model's head is not a plain linear layer.
    """

    def __init__(
        self,
        *,
        preset: str = "smollm2_135m",
        pretrained: str | None = None,
        architecture: Mapping[str, Any] | None = None,
        load_pretrained: bool = True,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: Literal["sdpa", "eager"] = "sdpa",
        recompute: bool = False,
        lora_rank: int | None = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[str] | None = None,
        dora: bool = False,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        warmup_steps: int = 10,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
    ) -> None:
        check_optimizer_choices(schedule=schedule, optimizer_kernel=optimizer_kernel)
        check_numbers(
            positive={"learning_rate": learning_rate, "eps": eps},
            not_negative={"weight_decay": weight_decay, "warmup_steps": warmup_steps},
        )
        if dora and lora_rank is None:
            raise ValueError(
                "dora=true needs adapters, and lora_rank=null trains all weights; give a rank, or dora=false."
            )
        # lists and mappings of a configuration library must not enter the checkpoint
        lora_targets = None if lora_targets is None else [str(name) for name in lora_targets]
        architecture = None if architecture is None else dict(architecture)
        betas = (float(betas[0]), float(betas[1]))
        given = locals()
        model, is_read = language_model_of(given, PRESETS)
        super().__init__(model)
        self.save_hyperparameters()
        self.hparams["betas"] = betas
        self._frozen = FrozenWeights(model, are_left_out=is_read and lora_rank is not None)
        self._tokenizer = OwnTokenizer(data="FinetuneData")
        self.data_settings: dict[str, Any] = {}
        self.recompute = recompute

    @override
    def recompute_blocks(self) -> list[nn.Module]:
        return blocks_of(self.policy)

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template.

        Raises:
            RuntimeError: If neither data nor a checkpoint has set one.
        """
        return self._tokenizer.chat

    @override
    def setup(self, stage: str) -> None:
        """Take the tokenizer from the data.

        Raises:
            ValueError: If the data's tokenizer or rows do not fit the model.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "chat"):
            positions = getattr(self.policy.config, "max_position_embeddings", None)
            if positions is not None and data.sequence_length > positions:  # pyright: ignore[reportOperatorIssue]
                raise ValueError(
                    f"data.sequence_length={data.sequence_length} exceeds the model's {positions} positions; lower it."
                )
            self._tokenizer.attach(data.chat, vocabulary=self._vocabulary)
            self.data_settings = {name: data.hparams[name] for name in _DATA}

    def largest_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the largest prepared batch for `batch`, whose tokens are all scored; plans use it."""
        return self.prepare_batch({name: value.to("meta") for name, value in batch.items()})

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW over the trained weights, and its schedule."""
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        groups = decay_groups(trained, weight_decay=self.hparams["weight_decay"])
        kept = [group for group in groups if group["params"]]
        return scheduled_adamw(kept, hparams=self.hparams, trainer=self.trainer)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the tokenizer beside the weights; leave out a frozen model that was read from a file."""
        checkpoint["finetune"] = {
            "chat": self._tokenizer.state(),
            "data": dict(self.data_settings),
            "complete": not self._frozen.are_left_out,
        }
        self._frozen.leave_out(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore tokenizer and weights.

        Raises:
            ValueError: If the checkpoint belongs to another model or tokenizer, or lacks weights that this model has not read.
        """
        saved = checkpoint.get("finetune")
        if saved is None:
            raise ValueError("this checkpoint is not one of finetune: it holds no tokenizer.")
        self._frozen.put_back(checkpoint, is_complete=saved["complete"])
        self.data_settings = dict(saved["data"])
        self._tokenizer.restore(saved["chat"], vocabulary=self._vocabulary)

    def write_samples(self, *, seed: int) -> list[str]:  # noqa: ARG002 - the likeliest tokens, the same for each seed
        """Return held-out prompts with greedy and expected answers; none without `FinetuneData`."""
        data: Any = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        if not self._tokenizer.is_set or not hasattr(data, "held_out"):
            return []
        from lightning_unified.models.finetune.use.evaluation import samples_of  # imports this module

        return samples_of(self, data.held_out, samples=_SAMPLES, max_new_tokens=_SAMPLE_TOKENS)

    @property
    def _vocabulary(self) -> int:
        return int(self.policy.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
