"""Rollouts of a GRPO module: collected once a batch, and kept for several optimizer steps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_unified.models.choices import check_choice
from lightning_unified.models.grpo.batches.budget import CompletionBudget
from lightning_unified.models.grpo.batches.rollouts import prepared
from lightning_unified.models.grpo.batches.sequences import outline
from lightning_unified.models.grpo.rollout import Completions, SamplingOptions

__all__ = ["KeptBatch", "RolloutCollector", "largest_batch"]


class RolloutCollector:
    """Collect rollouts in a batch's first iteration; keep the batch for later ones.

    Args:
        options: How completions are sampled.
        budget: See `completion_budget` of `GRPO`, as the next two.
        scale_rewards: See there.
        inner_iterations: See there.

    Raises:
        ValueError: If a name is unknown, `inner_iterations` is below 1, or the options allow no training: a temperature of 0, or
            groups of one completion.
    """

    def __init__(
        self,
        options: SamplingOptions,
        *,
        budget: str,
        scale_rewards: Literal["none", "group"],
        inner_iterations: int,
    ) -> None:
        check_choice("completion_budget", budget, ("fixed", "auto"))
        check_choice("scale_rewards", scale_rewards, ("none", "group"))
        if options.temperature <= 0:
            raise ValueError(f"temperature={options.temperature} must be above 0.")
        if options.group_size < 2:
            raise ValueError(f"group_size={options.group_size}; give 2 or more.")
        if inner_iterations < 1:
            raise ValueError(f"inner_iterations={inner_iterations}; give 1 or more.")
        self._scale: Literal["none", "group"] = scale_rewards
        self._inner_iterations = inner_iterations
        self._budget = CompletionBudget(options.max_new_tokens) if budget == "auto" else None
        self.kept = KeptBatch()

    def iteration(self, batch: Mapping[str, Any]) -> int:
        """Return the number of a batch's iteration; the first is 0.

        Raises:
            ValueError: If `inner_iterations` is above 1 and the batch has no number.
        """
        if self._inner_iterations == 1:
            return 0
        if "iteration" not in batch:
            raise ValueError(
                f"inner_iterations={self._inner_iterations} takes each batch several times; put the loader into "
                f"RolloutBuffer(loader, inner_iterations={self._inner_iterations})."
            )
        return int(batch["iteration"])

    @torch.no_grad()
    def collect(
        self,
        batch: Mapping[str, Tensor],
        sample: Callable[[Mapping[str, Tensor], SamplingOptions], tuple[Completions, dict[str, Tensor]]],
        options: SamplingOptions,
        *,
        is_first: bool,
        with_reference: bool,
    ) -> dict[str, Any]:
        """Return a batch of prompts as a prepared batch, for its first iteration.

        Args:
            batch: A batch of prompts, see `GRPO`.
            sample: Returns completions of a batch, and their rewards by name.
            options: For `sample`; the completion budget may lower `max_new_tokens`.
            is_first: Whether this is the run's first batch of prompts. It has the largest size, since memory is planned by it.
            with_reference: Whether a reference's log-probabilities will be stored for later iterations.
        """
        limit = options.max_new_tokens if self._budget is None else self._budget.limit
        sampled, rewards = sample(batch, replace(options, max_new_tokens=limit))
        width = options.max_new_tokens if is_first else None
        found = prepared(batch, sampled, rewards, group_size=options.group_size, scale=self._scale, width=width)
        if self._budget is not None:
            found["figures"]["budget"] = float(limit)
            self._budget.observe(sampled.mask.sum(1).tolist(), sampled.ended.tolist())
        return found if self._inner_iterations == 1 else self.kept.begin(found, with_reference=with_reference)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"rollouts": self.kept.state(), "budget": None if self._budget is None else self._budget.state_dict()}

    def restore(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Restore `state`, with kept tensors on `device`."""
        self.kept.restore(state["rollouts"], device=device)
        if self._budget is not None and state["budget"] is not None:
            self._budget.load_state_dict(state["budget"])


class KeptBatch:
    """A prepared batch for several optimizer steps.

    The first step stores log-probabilities for the later steps. It runs with the weights that sampled the completions. The ratio and
    the reference term of later steps need its log-probabilities, so no extra pass is made. A micro-batch stores its rows; a repeated
    micro-batch stores them again.
    """

    def __init__(self) -> None:
        self._batch: dict[str, Any] | None = None
        self._noted: dict[str, Tensor] = {}

    def begin(self, batch: dict[str, Any], *, with_reference: bool) -> dict[str, Any]:
        """Keep a prepared batch, with or without a reference; return its first iteration."""
        self._batch = batch
        self._noted = {"old": torch.zeros_like(batch["sampled_log_probs"], dtype=torch.float32)}
        if with_reference:
            self._noted["reference"] = torch.zeros_like(self._noted["old"])
        return self.again(0)

    @torch.no_grad()
    def note(self, row: Tensor, *, old: Tensor, reference: Tensor | None) -> None:
        """Store log-probabilities (r, T) of the rows `row` (r)."""
        for name, values in (("old", old), ("reference", reference)):
            if values is None:
                continue
            into = self._noted[name] = self._noted[name].to(values.dtype)
            into.index_copy_(0, row.to(into.device), values.to(into.device))

    def again(self, iteration: int) -> dict[str, Any]:
        """Return the kept batch for one iteration; the first is 0.

        The batch has `iteration`, a plain number; `row` (R), the index of each row; and the stored log-probabilities `old` and, with a
        reference, `reference` (R, T). These are present, though zero, before the first iteration: plans depend on a batch's fields.

        Raises:
            RuntimeError: If there is no kept batch.
        """
        if self._batch is None:
            raise RuntimeError("a batch is repeated that never came before; its iterations must come in order.")
        row = torch.arange(len(self._batch["mask"]), device=self._batch["mask"].device)
        noted = {name: values.clone() for name, values in self._noted.items()}
        return {**self._batch, **noted, "row": row, "iteration": iteration}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"batch": self._batch, "noted": dict(self._noted)}

    def restore(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Restore `state` on `device`."""
        self._batch, self._noted = move_data_to_device((state["batch"], state["noted"]), device)


def largest_batch(prompt: Tensor, options: SamplingOptions) -> dict[str, Any]:
    """Return the largest prepared batch of prompts (P, L), see `sequences.outline`."""
    return outline(
        len(prompt),
        prompt_length=prompt.shape[1],
        group_size=options.group_size,
        max_new_tokens=options.max_new_tokens,
        device=prompt.device,
    )
