"""What a GRPO module keeps from batch to batch, apart from weights: completions that are trained on again, and the sampler."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.grpo.batches.rollouts import Sampling
from lightning_unified.models.grpo.rollout import Sampler

__all__ = ["KeptRollouts", "SamplerSlot"]


class KeptRollouts:
    """A prepared batch of completions for several optimizer steps, and the log-probabilities that its first step finds for the others.

    The first step runs with the weights that sampled, so what it computes is what the ratio and the reference term of later steps need;
    no pass is made for them alone. Parts of a batch are noted by their rows, and a part that is repeated is noted again.
    """

    def __init__(self) -> None:
        self._batch: dict[str, Any] | None = None
        self._noted: dict[str, Tensor] = {}

    def begin(self, batch: dict[str, Any], *, with_reference: bool) -> dict[str, Any]:
        """Keep a prepared batch, and return it for its first iteration, as `again` does for the others.

        Args:
            batch: Of the first iteration.
            with_reference: Whether there will be log-probabilities of a reference.
        """
        self._batch = batch
        self._noted = {"old": torch.zeros_like(batch["sampled_log_probs"], dtype=torch.float32)}
        if with_reference:
            self._noted["reference"] = torch.zeros_like(self._noted["old"])
        return self.again(0)

    @torch.no_grad()
    def note(self, row: Tensor, *, old: Tensor, reference: Tensor | None) -> None:
        """Take down log-probabilities (r, T) of the rows `row` (r)."""
        for name, values in (("old", old), ("reference", reference)):
            if values is None:
                continue
            if self._noted[name].dtype != values.dtype:
                self._noted[name] = self._noted[name].to(values.dtype)
            into = self._noted[name]
            into.index_copy_(0, row.to(into.device), values.to(into.device))

    def again(self, iteration: int) -> dict[str, Any]:
        """Return the batch with `iteration`, a plain number; `row` (R), the place of each row; and what was noted: `old` and, where there
        is one, `reference` (R, T). Before the first iteration that is nothing yet, but there: a plan is for batches that have it.

        Args:
            iteration: The first is 0.

        Raises:
            RuntimeError: If no batch was begun.
        """
        if self._batch is None:
            raise RuntimeError(
                "a batch is to be trained on again, and none was before it; its iterations must come in order."
            )
        row = torch.arange(len(self._batch["mask"]), device=self._batch["mask"].device)
        noted = {name: values.clone() for name, values in self._noted.items()}
        return {**self._batch, **noted, "row": row, "iteration": iteration}

    def state(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        return {"batch": self._batch, "noted": dict(self._noted)}

    def restore(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Be as `state` says, on `device`."""
        batch = state["batch"]
        self._batch = None if batch is None else {key: _moved(value, device) for key, value in batch.items()}
        self._noted = {key: _moved(value, device) for key, value in state["noted"].items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


class SamplerSlot:
    """Where a module has its sampler, which holds caches and graphs of this very model: a copy of the module has an empty slot.

    Attributes:
        given: The user's own.
        made: The module's, in place of that; None as long as nothing was sampled.
    """

    def __init__(self, given: Sampling | None = None) -> None:
        self.given = given
        self.made: Sampler | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SamplerSlot":
        return SamplerSlot()
