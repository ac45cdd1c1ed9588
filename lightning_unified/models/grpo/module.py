"""GRPO as a LightningModule, with an optional supervised phase before it."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import signature
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.micro_batches import MicroBatchRules
from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo.batches.budget import CompletionBudget
from lightning_unified.models.grpo.batches.kept import KeptRollouts, SamplerSlot
from lightning_unified.models.grpo.batches.rollouts import Sampling, judged, prepared
from lightning_unified.models.grpo.batches.sequences import has_values, outline, supervised
from lightning_unified.models.grpo.objective import Objective, Terms
from lightning_unified.models.grpo.optimizer import Rates, build_optimizer
from lightning_unified.models.grpo.reference import Reference
from lightning_unified.models.grpo.rollout import Sampler
from lightning_unified.models.grpo.scoring import check_head, head_of, score
from lightning_unified.models.grpo.task import Task

__all__ = ["GRPO"]


class GRPO(LightningModule):
    """Train a causal language model by rewards, after supervised steps if the loader has any.

    For each prompt, the policy samples G completions, and the task rewards them. A completion's advantage is its reward minus its
    group's mean. The loss is the mean of `Objective` over the active tokens of the optimizer step. `prepare_batch` samples, rewards
    and counts once for the whole batch, before it is split; a repeated step reuses the result. Losses and gradients of micro-batches
    of any size add up to the loss and gradients of the whole batch. A row is a completion, so a micro-batch is a number of completions.

    Log-probabilities are computed in chunks from the last hidden states. The reference scores the same rows as the policy, without a
    gradient, so it never takes more memory than the step itself. With `inner_iterations` above 1, the first iteration stores both for
    the others, and a `RolloutBuffer` around the loader repeats the batches.

    A batch with `labels` is supervised: its loss is the mean cross-entropy of the labelled tokens. At the first batch of prompts, the
    policy becomes the reference, and the optimizer's state is cleared.

    Shapes:
        Batches of prompts: `prompt` (P, L) int64, pads on the left; `prompt_mask` (P, L) bool; `example` (P) int64, see `Task`.
        Supervised batches: `tokens` (B, S) int64, pads on the right; `labels` (B, S) int64, see `sequences.supervised`.

    Args:
        model: The policy: a causal language model of transformers, with or without adapters of peft. Weights that require a
            gradient are trained. Checkpoints of a subclass that builds the model from plain values hold these values.
        task: Rewards completions.
        decode: Turns a list of token ids into text without special tokens.
        stop_ids: Tokens that end a completion, besides the task's stop text.
        sampler: Samples completions, at `temperature`; None for `rollout.Sampler` with these settings.
        group_size: Completions of each prompt, G.
        max_new_tokens: Upper bound on the tokens of a completion.
        completion_budget: "fixed": the bound is always `max_new_tokens`. "auto": it follows the length of recent completions,
            see `CompletionBudget`.
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

    loss_chunk_rows: int | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        task: Task,
        decode: Callable[[list[int]], str],
        stop_ids: Collection[int] = (),
        sampler: Sampling | None = None,
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
        super().__init__()
        betas = (float(betas[0]), float(betas[1]))
        # a checkpoint holds the arguments of the class itself, also of a subclass
        others = signature(GRPO.__init__).parameters.keys() - signature(type(self).__init__).parameters.keys()
        self.save_hyperparameters(ignore=["model", "task", "decode", "stop_ids", "sampler", *others])
        if "betas" in self.hparams:
            self.hparams["betas"] = betas  # a tuple, not a list of a configuration library
        check_choice("completion_budget", completion_budget, ("fixed", "auto"))
        check_choice("scale_rewards", scale_rewards, ("none", "group"))
        check_choice("schedule", schedule, ("linear", "cosine", "constant"))
        check_choice("optimizer_kernel", optimizer_kernel, ("auto", "fused", "foreach", "forloop"))
        _check_above(temperature=temperature, learning_rate=learning_rate, sft_learning_rate=sft_learning_rate, eps=eps)
        _check_least(
            group_size=(group_size, 2), max_new_tokens=(max_new_tokens, 1), inner_iterations=(inner_iterations, 1)
        )
        _check_least(sft_steps=(sft_steps, 0), warmup_steps=(warmup_steps, 0), weight_decay=(weight_decay, 0))
        head_of(model)
        self.policy, self.task = model, task
        self.group_size, self.max_new_tokens = group_size, max_new_tokens
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.scale_rewards: Literal["none", "group"] = scale_rewards
        self.inner_iterations = inner_iterations
        self.objective = Objective(clip_low=clip_low, clip_high=clip_high, beta=beta)
        self.reference = Reference()
        self._decode, self._stop_ids, self._slot = decode, tuple(stop_ids), SamplerSlot(sampler)
        self._kept = KeptRollouts()
        self._rates = Rates(
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
        self._budget = CompletionBudget(max_new_tokens) if completion_budget == "auto" else None
        self._has_begun = False  # whether GRPO has begun, after the supervised phase
        self._is_checked = False

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Return the policy's parameters, without the reference's copies."""
        return self.policy.parameters()

    @property
    def sampler(self) -> Sampling:
        """The sampler of completions, at the current temperature."""
        slot = self._slot
        if slot.given is not None:
            return slot.given
        if slot.made is None:
            slot.made = Sampler(
                self.policy,
                stop_ids=self._stop_ids,
                stop_text=self.task.stop or None,
                decode=self._decode,
                top_k=self.top_k,
                top_p=self.top_p,
                kept_bytes=self._spare,
            )
        slot.made.temperature = self.temperature
        return slot.made

    def _spare(self) -> int | None:
        """Return the bytes that the strategy's plan leaves for the sampler's cache.

        The value is None without a plan or CUDA.
        """
        trainer = self._trainer if self.device.type == "cuda" else None
        return None if trainer is None else getattr(trainer.strategy, "spare_bytes", None)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the sampler's cache between steps."""
        return 0 if self._slot.made is None else self._slot.made.cache_bytes

    def give_back(self) -> None:
        """Free the sampler's cache; the next rollout allocates it again."""
        if self._slot.made is not None:
            self._slot.made.release()

    def configure_micro_batches(self, stage: str) -> MicroBatchRules:  # noqa: ARG002 - the hook has it
        """Return how a batch is split: losses divided by the batch's active tokens add up."""
        return MicroBatchRules(loss_is_sum=True, prepare=self.prepare_batch, loss_weight=self.active_tokens)

    def prepare_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch in the form for `training_step`; see `sequences`.

        A prepared batch stays unchanged.

        Completions are sampled and rewarded here. In a dry run, where tensors have no values, the largest possible batch is returned.

        Raises:
            ValueError: If `inner_iterations` is above 1 and the batch has no iteration number.
        """
        if "total" in batch:
            return dict(batch)
        if "labels" in batch:
            self._check(batch["tokens"])
            return supervised(batch["tokens"], batch["labels"])
        prompt = batch["prompt"]
        if not has_values(prompt):
            return outline(
                len(prompt),
                prompt_length=prompt.shape[1],
                group_size=self.group_size,
                max_new_tokens=self.max_new_tokens,
                device=prompt.device,
            )
        if self.inner_iterations == 1:
            return self._rollouts(batch)
        if "iteration" not in batch:
            raise ValueError(
                f"inner_iterations={self.inner_iterations} takes each batch several times; put the loader into "
                f"RolloutBuffer(loader, inner_iterations={self.inner_iterations})."
            )
        iteration = int(batch["iteration"])
        if iteration:
            return self._kept.again(iteration)
        return self._kept.begin(self._rollouts(batch), with_reference=self.objective.beta > 0)

    @torch.no_grad()
    def _rollouts(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        self._check(batch["prompt"])
        width = (
            None if self._has_begun else self.max_new_tokens
        )  # the first batch has the largest size, since memory is planned by it
        self._begin()
        budget, limit = self._budget, self.max_new_tokens if self._budget is None else self._budget.limit
        sampled = self.sampler(batch["prompt"], batch["prompt_mask"], group_size=self.group_size, max_new_tokens=limit)
        examples = batch["example"].repeat_interleave(self.group_size)
        rewards = judged(self.task, examples, sampled, decode=self._decode, step=self._steps)
        found = prepared(batch, sampled, rewards, group_size=self.group_size, scale=self.scale_rewards, width=width)
        if budget is not None:
            found["figures"]["budget"] = float(limit)
            budget.observe(sampled.mask.sum(1).tolist(), sampled.ended.tolist())
        return found

    def _begin(self) -> None:
        """Copy the policy to the reference and clear the optimizer's state.

        This happens at the first batch of prompts.
        """
        if self._has_begun:
            return
        self._has_begun = True
        if self.objective.beta:
            self.reference.begin(self.policy)
        if self._trainer is not None:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()

    def _check(self, tokens: Tensor) -> None:
        if not self._is_checked and has_values(tokens):
            check_head(self.policy)
            self._is_checked = True

    @property
    def _steps(self) -> int:
        return 0 if self._trainer is None else self.trainer.global_step

    def active_tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the loss weight of a batch: its active tokens, or its rows before it is prepared."""
        return int(batch["total"]) if "total" in batch else len(batch.get("prompt", batch.get("tokens")))

    @override
    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Tensor:
        if "total" not in batch:
            with torch.no_grad():
                batch = self.prepare_batch(batch)
        if "advantages" not in batch:
            log_probs, _ = self._score(batch)
            loss = -log_probs.masked_fill(~batch["mask"], 0.0).sum() / max(batch["total"], 1)
            self._log({"train/sft_loss": loss.detach()}, prog_bar=True)
            return loss
        repeated = batch.get("iteration", 0) > 0
        reference = batch.get("reference") if repeated else self._reference(batch)
        log_probs, entropy = self._score(batch)
        old = batch["old"] if repeated else log_probs.detach()
        terms = self.objective(
            log_probs,
            mask=batch["mask"],
            advantages=batch["advantages"],
            total=batch["total"],
            old=old,
            reference=reference,
        )
        if "row" in batch and not repeated:
            self._kept.note(batch["row"], old=old, reference=reference)
        self._log_terms(batch, terms, old, entropy)
        return terms.loss

    def _score(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return score(
            self.policy,
            batch["tokens"],
            start=batch["start"],
            chosen=batch["chosen"],
            temperature=self.temperature if "advantages" in batch else 1.0,
            chunk=self.loss_chunk_rows,
        )

    def _reference(self, batch: Mapping[str, Any]) -> Tensor | None:
        if not self.objective.beta:
            return None
        if self.reference.kind == "none":  # in a dry run, before the first real step
            self.reference.begin(self.policy, is_trained=self._rates.sft_steps > 0)
        with torch.no_grad(), self.reference.on(self.policy):
            return self._score(batch)[0]

    def _log_terms(self, batch: Mapping[str, Any], terms: Terms, old: Tensor, entropy: Tensor) -> None:
        """Log a micro-batch's values and the batch's figures.

        The values are shares of the whole batch and add up over micro-batches.
        """
        mask, total = batch["mask"], max(batch["total"], 1)
        gap = (old - batch["sampled_log_probs"]).abs()
        shares = {
            "train/entropy": (entropy * mask).sum() / total,
            "train/clipped": terms.clipped,
            "train/sampling_gap": (gap * mask).sum() / total,
        }
        if terms.kl is not None:
            shares["train/kl"] = terms.kl
        self._log({"train/loss": terms.loss.detach()}, prog_bar=True)
        self._log(shares)
        if self._trainer is not None:
            for name, value in batch["figures"].items():
                self.log(f"train/{name}", value, batch_size=len(mask), prog_bar=name == "reward")

    def _log(self, values: Mapping[str, Tensor], *, prog_bar: bool = False) -> None:
        if self._trainer is not None:
            for name, value in values.items():
                self.log(name, value, prog_bar=prog_bar)

    @override
    def validation_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> None:
        """Log a supervised batch's cross-entropy, or the rewards of one completion per prompt."""
        if "labels" in batch:
            found = supervised(batch["tokens"], batch["labels"])
            log_probs = self._score(found)[0].masked_fill(~found["mask"], 0.0)
            self.log("val/loss", -log_probs.sum() / max(found["total"], 1), batch_size=max(found["total"], 1))
        elif has_values(batch["prompt"]):
            sampled = self.sampler(
                batch["prompt"], batch["prompt_mask"], group_size=1, max_new_tokens=self.max_new_tokens
            )
            rewards = judged(self.task, batch["example"], sampled, decode=self._decode, step=self._steps)
            for name, value in rewards.items():
                of_all = "val/reward" if name == "total" else f"val/reward_{name}"
                self.log(of_all, value.float().mean(), batch_size=len(value), prog_bar=name == "total")

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW over the trained weights and a schedule of two phases.

        The schedule covers the Trainer's estimated steps.

        Raises:
            ValueError: If the schedule falls to 0 and the run has no end.
        """
        schedule, total = self._rates.schedule, self.trainer.estimated_stepping_batches
        if schedule != "constant" and not math.isfinite(total):
            raise ValueError(
                f"schedule={schedule!r} needs to know the last step; set max_steps or max_epochs, or schedule=constant."
            )
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        return build_optimizer(trained, rates=self._rates, total_steps=total, precision=str(self.trainer.precision))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save whether GRPO has begun, the reference, and completions with iterations left."""
        own = {"has_begun": self._has_begun, "reference": self.reference.state(), "rollouts": self._kept.state()}
        checkpoint["grpo"] = {**own, "budget": None if self._budget is None else self._budget.state_dict()}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state that `on_save_checkpoint` saves.

        Raises:
            ValueError: If the checkpoint belongs to another model.
        """
        saved = checkpoint.get("grpo")
        if saved is None:
            raise ValueError("this checkpoint is not one of GRPO: it does not say whether GRPO had begun.")
        self._has_begun = saved["has_begun"]
        self.reference.restore(saved["reference"], self.policy)
        self._kept.restore(saved["rollouts"], device=self.device)
        if self._budget is not None and saved["budget"] is not None:
            self._budget.load_state_dict(saved["budget"])


def _check_above(**given: float) -> None:
    for name, value in given.items():
        if value <= 0:
            raise ValueError(f"{name}={value} must be above 0.")


def _check_least(**given: tuple[float, float]) -> None:
    for name, (value, least) in given.items():
        if value < least:
            raise ValueError(f"{name}={value}; give {least} or more.")
