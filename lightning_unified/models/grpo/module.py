"""GRPO as a LightningModule, with an optional supervised phase before it.

One optimizer step on a batch of prompts:

1. `prepare_batch` samples, rewards and counts once for the whole batch, before it is split; a repeated step reuses the result. Rows of
   the prepared batch are completions, so a micro-batch is a number of completions.
2. `training_step` computes log-probabilities in chunks from the last hidden states. The reference scores the same rows as the policy,
   without a gradient, so it never takes more memory than the step itself.
3. The loss is divided by the active tokens of the whole batch. Losses and gradients of micro-batches of any size therefore add up to
   the loss and gradients of the whole batch.

With `inner_iterations` above 1, the first iteration stores the log-probabilities of policy and reference for the others, and a
`RolloutBuffer` around the loader repeats the batches. Checkpoints of a subclass that builds the model from plain values hold these
values.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.causal_lm.labelled_rows import has_values
from lightning_unified.models.causal_lm.language_model import score
from lightning_unified.models.causal_lm.supervised import SupervisedLanguageModel
from lightning_unified.models.grpo.batches.collector import RolloutCollector, largest_batch
from lightning_unified.models.grpo.batches.rollouts import rewards_of
from lightning_unified.models.grpo.completion_loss import SHARES, completion_loss
from lightning_unified.models.grpo.objective import Objective
from lightning_unified.models.grpo.optimizer import Rates, build_optimizer
from lightning_unified.models.grpo.reference import Reference
from lightning_unified.models.grpo.rollout import Completions, CompletionSampler, SamplingOptions
from lightning_unified.models.grpo.rollout.sampler import SamplerSlot
from lightning_unified.models.grpo.rollout.sampling_module import SamplingModule, spare_bytes
from lightning_unified.models.grpo.task import Task

__all__ = ["GRPO"]


class GRPO(SamplingModule, SupervisedLanguageModel):
    """Train a causal language model by rewards, after supervised steps if the loader has any.

    For each prompt, the policy samples G completions, and the task rewards them. A completion's advantage is its reward minus its
    group's mean. The loss is the mean of `Objective` over the active tokens of the optimizer step.

    A batch with `labels` is supervised: its loss is the mean cross-entropy of the labelled tokens. At the first batch of prompts, the
    policy becomes the reference, and the optimizer's state is cleared.

    Shapes:
        Batches of prompts: `prompt` (P, L) int64, pads on the left; `prompt_mask` (P, L) bool; `example` (P) int64, see `Task`.
        Supervised batches: `tokens` (B, S) int64, pads on the right; `labels` (B, S) int64, see `causal_lm.labelled_rows`.

    Args:
        model: The policy: a causal language model of transformers, with or without adapters of peft. Weights with a gradient are trained.
        task: Rewards completions.
        decode: Turns a list of token ids into text without special tokens.
        stop_ids: Tokens that end a completion, besides the task's stop text.
        sampler: Samples completions, see `rollout.CompletionSampler`; None for `rollout.Sampler`.
        group_size: Completions of each prompt, G.
        max_new_tokens: Upper bound on the tokens of a completion.
        completion_budget: "fixed": the bound stays. "auto": it follows the length of recent completions, see `CompletionBudget`.
        temperature: Sampling temperature; log-probabilities use the same distribution.
        top_k: Sample from the k likeliest tokens; 0 for all. Log-probabilities ignore it.
        top_p: Sample from the likeliest tokens that together have this probability; 1 for all. Log-probabilities ignore it.
        scale_rewards: "none" centres advantages; "group" also divides them by their group's standard deviation.
        clip_low: See `Objective`.
        clip_high: See `Objective`.
        beta: See `Objective`; 0 uses no reference.
        inner_iterations: Optimizer steps on the completions of a batch.
        sft_steps: Optimizer steps of the supervised phase, for the learning-rate schedule; the loader decides the batches.
        sft_learning_rate: Peak learning rate of that phase.
        learning_rate: Peak learning rate of GRPO.
        weight_decay: AdamW's weight decay.
        betas: AdamW's two decay rates.
        eps: AdamW's epsilon.
        warmup_steps: Optimizer steps of linear rise from 0, in each phase.
        schedule: After the warm-up: "linear" or "cosine" to 0 at the phase's last step, or "constant".
        optimizer_kernel: "fused" (no temporaries), "foreach", "forloop", or "auto": fused where torch has it.

    Raises:
        ValueError: If a name is unknown, a number is out of range, or the policy's head is not a plain linear layer.
    """

    loss_name: ClassVar[str] = "train/sft_loss"  # of the supervised phase
    shares: ClassVar[tuple[str, ...]] = ("train/loss", *SHARES)

    def __init__(
        self,
        model: nn.Module,
        *,
        task: Task,
        decode: Callable[[list[int]], str],
        stop_ids: Collection[int] = (),
        sampler: CompletionSampler | None = None,
        group_size: int = 8,
        max_new_tokens: int = 128,
        completion_budget: Literal["fixed", "auto"] = "fixed",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        scale_rewards: Literal["none", "group"] = "none",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.0,
        inner_iterations: int = 1,
        sft_steps: int = 0,
        sft_learning_rate: float = 1e-4,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        warmup_steps: int = 0,
        schedule: Literal["linear", "cosine", "constant"] = "constant",
        optimizer_kernel: Literal["auto", "fused", "foreach", "forloop"] = "auto",
    ) -> None:
        betas = (float(betas[0]), float(betas[1]))
        rates = Rates(
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
        super().__init__(model)
        self._rates = rates
        # a checkpoint holds the arguments of the class itself, also of a subclass
        others = signature(GRPO.__init__).parameters.keys() - signature(type(self).__init__).parameters.keys()
        self.save_hyperparameters(ignore=["model", "task", "decode", "stop_ids", "sampler", *others])
        if "betas" in self.hparams:
            self.hparams["betas"] = betas  # a tuple, not a list of a configuration library
        self.task, self.inner_iterations, self._decode = task, inner_iterations, decode
        self.sampling = SamplingOptions(
            group_size=group_size, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p
        )
        self.objective, self.reference = Objective(clip_low=clip_low, clip_high=clip_high, beta=beta), Reference()
        own = {"model": model, "stop_ids": stop_ids, "stop_text": task.stop or None, "decode": decode}
        self._slot = SamplerSlot(sampler, **own, kept_bytes=partial(spare_bytes, self))
        self._collector = RolloutCollector(
            self.sampling, budget=completion_budget, scale_rewards=scale_rewards, inner_iterations=inner_iterations
        )
        self._has_begun = False  # whether GRPO has begun, after the supervised phase

    @override
    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch for `training_step`, see `batches.sequences`; a prepared one unchanged.

        Completions are sampled and rewarded here. In a dry run, where tensors have no values, the largest possible batch is returned.

        Raises:
            ValueError: If `inner_iterations` is above 1 and the batch has no iteration number.
        """
        if "total" in batch or "labels" in batch:
            return super().prepare_batch(batch)
        if not has_values(batch["prompt"]):
            return largest_batch(batch["prompt"], self.sampling)
        if iteration := self._collector.iteration(batch):
            return self._collector.kept.again(iteration)
        self._check_head(batch["prompt"])
        if is_first := not self._has_begun:  # the policy becomes the reference, and the optimizer begins anew
            self._has_begun = True
            if self.objective.beta:
                self.reference.begin(self.policy)
            for optimizer in [] if self._trainer is None else self.trainer.optimizers:
                optimizer.state.clear()
        return self._collector.collect(
            batch, self._sample, self.sampling, is_first=is_first, with_reference=self.objective.beta > 0
        )

    def _sample(self, batch: Mapping[str, Tensor], options: SamplingOptions) -> tuple[Completions, dict[str, Tensor]]:
        """Return completions of a batch of prompts, and their rewards by name."""
        sampled = self.sampler(batch["prompt"], batch["prompt_mask"], options)
        examples = batch["example"].repeat_interleave(options.group_size)
        step = 0 if self._trainer is None else self.trainer.global_step
        return sampled, rewards_of(self.task, examples, sampled, decode=self._decode, step=step)

    @override
    def compute_loss(self, batch: Mapping[str, Any]) -> Tensor:
        if "advantages" not in batch:
            return super().compute_loss(batch)
        if self.objective.beta and self.reference.kind == "none":  # in a dry run, before the first real step
            self.reference.begin(self.policy, is_trained=self._rates.sft_steps > 0)
        score = partial(self.score, batch)
        parts = {"objective": self.objective, "reference": self.reference, "kept": self._collector.kept}
        loss, shares = completion_loss(self.policy, batch, score, **parts)
        self._log({"train/loss": loss.detach(), **shares}, shown="train/loss")
        figures = {f"train/{name}": value for name, value in batch["figures"].items()}
        self._log(figures, shown="train/reward", batch_size=len(batch["mask"]))
        return loss

    def score(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (R, T) of prepared rows' `chosen` tokens, and entropies there."""
        return score(
            self.policy,
            batch["tokens"],
            start=batch["start"],
            chosen=batch["chosen"],
            temperature=self.temperature,
            chunk=self.loss_chunk_rows,
        )

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and a schedule over the Trainer's estimated steps, see `build_optimizer`."""
        return build_optimizer(self.policy.parameters(), rates=self._rates, trainer=self.trainer)

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        """Log a supervised batch's cross-entropy, or the rewards of one completion per prompt."""
        if "labels" in batch:
            super().validation_step(batch, batch_idx)
        elif has_values(batch["prompt"]):
            rewards = self._sample(batch, replace(self.sampling, group_size=1))[1]
            means = {f"val/reward_{name}": value.float().mean() for name, value in rewards.items()}
            means["val/reward"] = means.pop("val/reward_total")
            self._log(means, shown="val/reward", batch_size=len(batch["example"]))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save whether GRPO has begun, the reference, and completions with iterations left."""
        own = {"has_begun": self._has_begun, "reference": self.reference.state()}
        checkpoint["grpo"] = {**own, **self._collector.state()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the saved state; raise a ValueError if the checkpoint belongs to another model."""
        saved = checkpoint.get("grpo")
        if saved is None:
            raise ValueError("this checkpoint is not one of GRPO: it does not say whether GRPO had begun.")
        self._has_begun = saved["has_begun"]
        self.reference.restore(saved["reference"], self.policy)
        self._collector.restore(saved, device=self.device)
