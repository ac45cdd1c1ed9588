"""Protocol of a task: it rewards completions."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Task"]


class Task(Protocol):
    """Reward completions of the loader's prompts.

    Attributes:
        stop: Text that ends a completion; "" for none.
    """

    stop: str

    def rewards(self, examples: Tensor, completions: Sequence[str], *, step: int = 0) -> dict[str, Tensor]:
        """Return the rewards of B prompts' completions, G for each prompt in a row.

        Args:
            examples: (B * G) int64, on any device: the loader's number of each completion's prompt.
            completions: Their texts, without special tokens.
            step: Optimizer steps of the run so far, for rewards that change with time.

        Returns:
            By name, (B * G) floating-point, on any device: "total" is the reward to train on; the others are logged.
        """
        ...
