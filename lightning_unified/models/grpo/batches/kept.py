"""State of a GRPO module between batches: completions with iterations left, and the sampler."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.grpo.batches.rollouts import Sampling
from lightning_unified.models.grpo.rollout import Sampler

__all__ = ["KeptRollouts", "SamplerSlot"]


class KeptRollouts:
    """A prepared batch for several optimizer steps.

    The first step stores log-probabilities for the later steps.

    The first step runs with the weights that sampled the completions. The ratio and the reference term of later steps need its
    log-probabilities, so no extra pass is made. A micro-batch stores its rows; a repeated micro-batch stores them again.
    """

    def __init__(self) -> None:
        self._batch: dict[str, Any] | None = None
        self._noted: dict[str, Tensor] = {}

    def begin(self, batch: dict[str, Any], *, with_reference: bool) -> dict[str, Any]:
        """Keep a prepared batch, and return it for its first iteration.

        Args:
            batch: The prepared batch.
            with_reference: Whether a reference's log-probabilities will be stored.
        """
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
            if self._noted[name].dtype != values.dtype:
                self._noted[name] = self._noted[name].to(values.dtype)
            into = self._noted[name]
            into.index_copy_(0, row.to(into.device), values.to(into.device))

    def again(self, iteration: int) -> dict[str, Any]:
        """Return the kept batch for one iteration.

        The batch has `iteration`, a plain number; `row` (R), the index of each row; and the stored log-probabilities `old` and, with a
        reference, `reference` (R, T). These are present, though zero, before the first iteration: plans depend on a batch's fields.

        Args:
            iteration: The first is 0.

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
        batch = state["batch"]
        self._batch = None if batch is None else {key: _moved(value, device) for key, value in batch.items()}
        self._noted = {key: _moved(value, device) for key, value in state["noted"].items()}


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


class SamplerSlot:
    """Holder of a module's sampler.

    A copy of the module has an empty holder, because caches and graphs belong to one model.

    Attributes:
        given: The user's sampler.
        made: The module's own sampler if `given` is None; None before the first rollout.
    """

    def __init__(self, given: Sampling | None = None) -> None:
        self.given = given
        self.made: Sampler | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SamplerSlot":
        return SamplerSlot()
