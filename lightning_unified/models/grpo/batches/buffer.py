"""A loader that repeats batches of prompts, for several steps on the same completions."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["RolloutBuffer"]


class _Loader(Protocol):
    def __iter__(self) -> Iterator[Mapping[str, Tensor]]: ...

    def __len__(self) -> int: ...


class RolloutBuffer:
    """Repeat each batch of prompts `inner_iterations` times.

    The key "iteration" (0-dim int64) numbers the repetitions. `GRPO.prepare_batch` samples completions for number 0 and returns the
    same completions for the other numbers. It runs on the device, in the run's precision, and once even if a step is repeated.
    Supervised batches, which have no prompts, come once. Lightning saves the loader's place in its checkpoints.

    Args:
        loader: Loader of dicts of tensors; its own place is saved if it has one. Its attribute `supervised_batches`, if any, is
            the number of batches without prompts.
        inner_iterations: Optimizer steps on the completions of a batch.

    Raises:
        ValueError: If `inner_iterations` is below 1.
    """

    def __init__(self, loader: _Loader, *, inner_iterations: int) -> None:
        if inner_iterations < 1:
            raise ValueError(f"inner_iterations={inner_iterations}; give 1 or more.")
        self.loader, self.inner_iterations = loader, inner_iterations
        self._next = 0  # the next iteration of the held batch
        self._held: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of batches, repeated ones included."""
        once = getattr(self.loader, "supervised_batches", 0)
        return once + (len(self.loader) - once) * self.inner_iterations

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches, first the remaining iterations of a held one."""
        if self._held is not None:
            yield from self._rest()
        for batch in self.loader:
            if "prompt" in batch:
                self._held, self._next = dict(batch), 0
                yield from self._rest()
            else:
                yield dict(batch)

    def _rest(self) -> Iterator[dict[str, Tensor]]:
        while self._held is not None:
            batch = {**self._held, "iteration": torch.tensor(self._next)}
            self._next += 1
            if self._next == self.inner_iterations:
                self._held = None
            yield batch

    @property
    def batch_sampler(self) -> Any:
        """The loader's batch sampler, on which Lightning sets the epoch."""
        return getattr(self.loader, "batch_sampler", None)

    @property
    def sampler(self) -> Any:
        """As `batch_sampler`."""
        return getattr(self.loader, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and the loader's own if it has one."""
        inner = getattr(self.loader, "state_dict", None)
        return {"next": self._next, "held": self._held, "loader": None if inner is None else inner()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the place of `state`."""
        self._next, self._held = state["next"], state["held"]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # pyright: ignore[reportAttributeAccessIssue]
