"""Wordle as a LightningModule: imitation of a solver, then GRPO with the game's rewards."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_unified.models.causal_lm.checkpoint import FrozenWeights
from lightning_unified.models.causal_lm.choice import language_model_of
from lightning_unified.models.grpo import GRPO
from lightning_unified.models.pretrained.architecture import blocks_of
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.pretrained.recompute_switch import RecomputeSwitch
from lightning_unified.models.wordle.data.identity import Identity
from lightning_unified.models.wordle.presets import PRESETS
from lightning_unified.models.wordle.rewards import COMPONENTS, WordleTask

__all__ = ["Wordle"]

_ARGUMENTS_OF_GRPO = signature(GRPO.__init__).parameters.keys() - {
    "self",
    "model",
    "task",
    "decode",
    "stop_ids",
    "sampler",
}


class Wordle(RecomputeSwitch, GRPO):
    """`GRPO` with the language model, the rewards and the tokenizer of the game.

    Words, prompts and tokenizer come from the data module (`WordleData`) when a fit begins. Each checkpoint holds the tokenizer and the
    source of the words. It leaves out frozen weights that come from a file.

    Args:
        preset: A name in `wordle.presets.PRESETS`.
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
        format: Weight of a reward, see `rewards.Reward`, as the next five.
        valid: See `format`.
        consistent: See `format`.
        entropy: See `format`.
        solved: See `format`.
        entropy_from_step: See `format`.
        temperature: Sampling temperature at the first step of GRPO.
        temperature_end: Temperature at the last step, linear in between; None for a constant one.
        group_size: See `GRPO`.
        max_new_tokens: See `GRPO`.
        completion_budget: See `GRPO`.
        top_k: See `GRPO`.
        top_p: See `GRPO`.
        scale_rewards: See `GRPO`.
        clip_low: See `GRPO`.
        clip_high: See `GRPO`.
        beta: See `GRPO`.
        inner_iterations: See `GRPO`.
        sft_steps: See `GRPO`.
        sft_learning_rate: See `GRPO`.
        learning_rate: See `GRPO`.
        weight_decay: See `GRPO`.
        betas: See `GRPO`.
        eps: See `GRPO`.
        warmup_steps: See `GRPO`.
        schedule: See `GRPO`.
        optimizer_kernel: See `GRPO`.

    Raises:
        FileNotFoundError: If the weights are not found.
        RuntimeError: If transformers or peft is not installed.
        ValueError: If a name is unknown or a number is out of range.
    """

    batch_dims: ClassVar = {"prompt": 2, "prompt_mask": 2, "example": 1}

    def __init__(
        self,
        *,
        preset: str = "wordle",
        pretrained: str | None = None,
        architecture: Mapping[str, Any] | None = None,
        load_pretrained: bool = True,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attention: Literal["sdpa", "eager"] = "sdpa",
        recompute: bool = False,
        lora_rank: int | None = 64,
        lora_alpha: float = 128.0,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[str] | None = None,
        format: float = 0.1,  # noqa: A002 - as in Reward
        valid: float = 0.1,
        consistent: float = 0.5,
        entropy: float = 0.3,
        solved: float = 1.0,
        entropy_from_step: int = 0,
        temperature: float = 1.0,
        temperature_end: float | None = None,
        group_size: int = 8,
        max_new_tokens: int = 64,
        completion_budget: Literal["fixed", "auto"] = "auto",
        top_k: int = 0,
        top_p: float = 1.0,
        scale_rewards: Literal["none", "group"] = "none",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        inner_iterations: int = 1,
        sft_steps: int = 0,
        sft_learning_rate: float = 5e-4,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        warmup_steps: int = 10,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
    ) -> None:
        # lists and mappings of a configuration library must not enter the checkpoint
        lora_targets = None if lora_targets is None else [str(name) for name in lora_targets]
        architecture = None if architecture is None else dict(architecture)
        given = locals()
        model, is_read = language_model_of(given, PRESETS)
        weights = {name: given[name] for name in COMPONENTS}
        identity = Identity()
        super().__init__(
            model,
            task=WordleTask(**weights, entropy_from_step=entropy_from_step),
            decode=identity,
            stop_ids=identity.stop_ids,
            **{name: given[name] for name in _ARGUMENTS_OF_GRPO & given.keys()},
        )
        self.identity = identity
        self._frozen = FrozenWeights(model, are_left_out=is_read and lora_rank is not None)
        self.trained_steps = 0
        self.recompute = recompute

    @override
    def recompute_blocks(self) -> list[nn.Module]:
        return blocks_of(self.policy)

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template; see `Identity.chat`."""
        return self.identity.chat

    @override
    def setup(self, stage: str) -> None:
        """Take tokenizer, words and prompts from the data; see `Identity.take`."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "chat"):
            self.identity.take(data, self.policy.config, max_new_tokens=self.sampling.max_new_tokens)
            self.task.take(data.words, patterns=data.patterns, examples=data.examples)  # pyright: ignore[reportAttributeAccessIssue]

    def largest_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the largest prepared batch for `batch`, without sampling; plans use it."""
        with torch.device("cpu"):
            return self.prepare_batch({name: value.to("meta") for name, value in batch.items()})

    def generations(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of the sampling before a step on `batch`: sequences, prompts, tokens.

        A batch of traces has no sampling. A plan computes sampling by formula instead of a trace; the keys are the
        formula's arguments.
        """
        if "prompt" in batch:
            prompts, length = batch["prompt"].shape
        elif "advantages" in batch:
            prompts = -(-len(batch["tokens"]) // self.sampling.group_size)
            length = batch["tokens"].shape[1] - batch["chosen"].shape[1]
        else:
            return {}
        rows = prompts * self.sampling.group_size
        return {"rows": rows, "prompts": prompts, "prompt": length, "new": self.sampling.max_new_tokens}

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the temperature at which this batch's completions are sampled and scored."""
        first, last, sft_steps = (self.hparams[name] for name in ("temperature", "temperature_end", "sft_steps"))
        if last is not None and "labels" not in batch:
            total = float(self.trainer.estimated_stepping_batches) - sft_steps
            done = (self.trainer.global_step - sft_steps) // self.inner_iterations * self.inner_iterations
            self.temperature = first + min(max(done / max(total - 1, 1), 0.0), 1.0) * (last - first)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save tokenizer and sizes beside the weights.

        Playing needs only this file and the left-out weights.
        """
        super().on_save_checkpoint(checkpoint)
        checkpoint["wordle"] = {**self.identity.state(), "complete": not self._frozen.are_left_out}
        self._frozen.leave_out(checkpoint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore tokenizer and weights.

        Raises:
            ValueError: If the checkpoint belongs to another model or tokenizer, or lacks weights that this model has not read.
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("wordle")
        if saved is None:
            raise ValueError("this checkpoint is not one of Wordle: it holds no tokenizer and no words.")
        self._frozen.put_back(checkpoint, is_complete=saved["complete"])
        self.trained_steps = int(checkpoint.get("global_step", 0))
        self.identity.restore(saved, vocabulary=int(self.policy.config.vocab_size))  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
