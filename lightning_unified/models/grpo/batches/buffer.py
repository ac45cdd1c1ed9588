"""Several optimizer steps on the same completions: a loader that gives each batch of prompts several times, numbered."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["RolloutBuffer"]


class _Loader(Protocol):
    def __iter__(self) -> Iterator[Mapping[str, Tensor]]: ...

    def __len__(self) -> int: ...


class RolloutBuffer:
    """Gives each batch of prompts of a loader `inner_iterations` times, with its number as "iteration" (0-dim int64).

    `GRPO.prepare_batch` samples completions when the number is 0 and returns the same completions for the other numbers. It runs where
    batches are on the device, in the run's precision, and once even if a step is repeated. Batches without prompts, those of the supervised
    phase, come once. Its place can be saved: Lightning does so with its checkpoints.

    Args:
        loader: Of dicts of tensors; its own place is saved where it has one. It may say how many of its batches have no prompts by
            an attribute `supervised_batches`.
        inner_iterations: Optimizer steps on the completions of a batch.

    Raises:
        ValueError: If `inner_iterations` is below 1.
    """

    def __init__(self, loader: _Loader, *, inner_iterations: int) -> None:
        if inner_iterations < 1:
            raise ValueError(f"inner_iterations={inner_iterations}; give 1 or more.")
        self.loader, self.inner_iterations = loader, inner_iterations
        self._next = 0  # the iteration that is due of the batch held
        self._held: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        """Return how many batches there are, the repeated ones included."""
        once = getattr(self.loader, "supervised_batches", 0)
        return once + (len(self.loader) - once) * self.inner_iterations

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches; first what is left of one that was under way."""
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
        """The loader's own, where Lightning looks for what it tells the epoch."""
        return getattr(self.loader, "batch_sampler", None)

    @property
    def sampler(self) -> Any:
        """As `batch_sampler`."""
        return getattr(self.loader, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return its place, and the loader's where it has one."""
        inner = getattr(self.loader, "state_dict", None)
        return {"next": self._next, "held": self._held, "loader": None if inner is None else inner()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the place of `state`."""
        self._next, self._held = state["next"], state["held"]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # pyright: ignore[reportAttributeAccessIssue]
