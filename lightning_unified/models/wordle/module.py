"""Wordle as a LightningModule: imitation of a solver, then GRPO with the game's rewards."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo import GRPO
from lightning_unified.models.grpo.policy import (
    DTYPES,
    adapt,
    architecture_of,
    blocks_of,
    build_policy,
    find_policy,
    load_policy,
    read_architecture,
)
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.wordle.presets import preset as preset_called
from lightning_unified.models.wordle.task import WordleTask
from lightning_unified.nn.recomputing import Recomputing

__all__ = ["Wordle"]


class Wordle(GRPO):
    """`GRPO` with the language model, the rewards and the tokenizer of the game.

    Words, prompts and tokenizer come from the data module (`WordleData`) when a fit begins. Each checkpoint holds the tokenizer and the
    source of the words. It leaves out frozen weights that come from a file.

    Args:
        preset: A name in `presets.PRESETS`.
        pretrained: Source of the weights, in place of the preset's; see `grpo.policy.find_policy`.
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
        check_choice("dtype", dtype, DTYPES)
        check_choice("attention", attention, ("sdpa", "eager"))
        model, is_read = _model(
            preset, pretrained, architecture, load=load_pretrained, kept={"dtype": dtype, "attention": attention}
        )
        if lora_rank is not None:
            adapt(model, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout, targets=lora_targets)
        weights = {"format": format, "valid": valid, "consistent": consistent, "entropy": entropy, "solved": solved}
        text, stop_ids = _Text(), []
        super().__init__(
            model,
            task=WordleTask(**weights, entropy_from_step=entropy_from_step),
            decode=text,
            stop_ids=stop_ids,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            completion_budget=completion_budget,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            scale_rewards=scale_rewards,
            clip_low=clip_low,
            clip_high=clip_high,
            beta=beta,
            inner_iterations=inner_iterations,
            sft_steps=sft_steps,
            sft_learning_rate=sft_learning_rate,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            warmup_steps=warmup_steps,
            schedule=schedule,
            optimizer_kernel=optimizer_kernel,
        )
        self._text, self._stop_ids = text, stop_ids
        self._leaves_out = is_read and lora_rank is not None
        self._temperatures = (temperature, temperature_end)
        self.game: dict[str, Any] = {}
        self.trained_steps = 0
        self._recomputing: Recomputing | None = None
        self.recompute = recompute

    @property
    def recompute(self) -> bool:
        """Whether each block recomputes its activations; a strategy may set it before the run."""
        return self._recomputing is not None

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if value and self._recomputing is None:
            self._recomputing = Recomputing(self.recompute_blocks())
        elif not value and self._recomputing is not None:
            self._recomputing.remove()
            self._recomputing = None

    def recompute_blocks(self) -> list[nn.Module]:
        """Return the policy's blocks, for activation checkpointing of some of them."""
        return blocks_of(self.policy)

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template.

        Raises:
            RuntimeError: If neither data nor a checkpoint has set one.
        """
        if self._text.chat is None:
            raise RuntimeError(
                "this model has no tokenizer yet; train it with WordleData, or load a checkpoint of such a run."
            )
        return self._text.chat

    def attach(self, chat: ChatTokenizer) -> None:
        """Set this model's tokenizer.

        Raises:
            ValueError: If it has more tokens than the model has rows, or the model was trained with another one.
        """
        rows = int(self.policy.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        if len(chat) > rows:
            raise ValueError(
                f"the tokenizer has {len(chat):,} tokens, the model's vocabulary is {rows:,}; set data.pretrained to the model's own, or "
                f"lower data.vocab_size to {rows}."
            )
        if self._text.chat is not None and self._text.chat != chat:
            raise ValueError(
                "this model was trained with another tokenizer or chat template than the data's; set data.pretrained and "
                "data.vocab_size as they were."
            )
        self._text.chat = chat
        self._stop_ids[:] = [chat.end_id]

    @override
    def setup(self, stage: str) -> None:
        """Take tokenizer, words and prompts from the data.

        Raises:
            ValueError: If the tokenizer differs from this model's, or prompt and completion exceed its positions.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        if not hasattr(data, "chat"):
            return
        positions = getattr(self.policy.config, "max_position_embeddings", None)
        if positions is not None and positions < data.prompt_length + self.sampling.max_new_tokens:
            raise ValueError(
                f"data.prompt_length={data.prompt_length} and model.max_new_tokens={self.sampling.max_new_tokens} have no place in the model's "
                f"{positions} positions; lower them."
            )
        self.attach(data.chat)
        self.task.take(data.words, patterns=data.patterns, examples=data.examples)  # pyright: ignore[reportAttributeAccessIssue]
        settings = ("words", "held_out_fraction", "seed", "prompt_length")
        self.game = {name: data.hparams[name] for name in settings}

    def largest_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the largest prepared batch for `batch`, without sampling; plans use it."""
        with torch.device("cpu"):
            return self.prepare_batch({name: value.to("meta") for name, value in batch.items()})

    def generations(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of the sampling before a step on `batch`: sequences, prompts, tokens.

        A batch of traces has no sampling.

        A plan computes sampling by formula instead of a trace; the keys are the formula's arguments.
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
        first, last = self._temperatures
        if last is None or "labels" in batch:
            return
        sft_steps = self.hparams["sft_steps"]
        total = float(self.trainer.estimated_stepping_batches) - sft_steps
        done = (self.trainer.global_step - sft_steps) // self.inner_iterations * self.inner_iterations
        share = min(max(done / max(total - 1, 1), 0.0), 1.0)
        self.temperature = first + share * (last - first)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save tokenizer and sizes beside the weights.

        Playing needs only this file and the left-out weights.
        """
        super().on_save_checkpoint(checkpoint)
        checkpoint["wordle"] = {
            "chat": None if self._text.chat is None else self._text.chat.to_dict(),
            "game": dict(self.game),
            "complete": not self._leaves_out,
        }
        if self._leaves_out:
            for name in self._frozen():
                checkpoint["state_dict"].pop(name, None)
        else:
            own = {"architecture": architecture_of(self.policy), "load_pretrained": False}
            checkpoint["hyper_parameters"] = {**checkpoint.get("hyper_parameters", {}), **own}

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
        if not saved["complete"]:
            if not self._leaves_out:
                raise ValueError(
                    "this checkpoint holds adapters only, and the model beside them has not read its weights; leave "
                    "load_pretrained=true and give the model and the adapters it was trained with."
                )
            own = self.state_dict()
            checkpoint["state_dict"].update({name: own[name] for name in self._frozen()})
        self.trained_steps = int(checkpoint.get("global_step", 0))
        self.game = dict(saved["game"])
        if saved["chat"] is not None:
            self.attach(ChatTokenizer.from_dict(saved["chat"]))

    def _frozen(self) -> list[str]:
        trained = {id(one) for one in self.policy.parameters() if one.requires_grad}
        held = self.policy.state_dict(prefix="policy.", keep_vars=True)
        return [name for name, value in held.items() if id(value) not in trained]


class _Text:
    """Decoder of token ids whose tokenizer is set later."""

    def __init__(self) -> None:
        self.chat: ChatTokenizer | None = None

    def __call__(self, ids: list[int]) -> str:
        if self.chat is None:
            raise RuntimeError(
                "this model has no tokenizer yet; train it with WordleData, or load a checkpoint of such a run."
            )
        return self.chat.decode(ids)


def _model(
    name: str, pretrained: str | None, architecture: Mapping[str, Any] | None, *, load: bool, kept: Mapping[str, str]
) -> tuple[nn.Module, bool]:
    """Return the language model, and whether its weights were read from files."""
    chosen = preset_called(name)
    source = pretrained or (chosen.pretrained if architecture is None else None)
    has_values = not torch.empty(0).is_meta
    if source is not None and load and has_values and architecture is None:
        return load_policy(find_policy(source), **kept), True
    if pretrained is not None and architecture is None:
        architecture = read_architecture(find_policy(pretrained))
    return build_policy(architecture or chosen.architecture, **kept), source is not None and load
