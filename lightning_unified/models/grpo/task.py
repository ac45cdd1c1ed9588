"""What a policy is trained for: completions in, rewards out."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Task"]


class Task(Protocol):
    """Judges completions of the prompts that a loader gives as tensors.

    Attributes:
        stop: Text with which a completion ends, and nothing behind it is sampled; "" for none.
    """

    stop: str

    def rewards(self, examples: Tensor, completions: Sequence[str], *, step: int = 0) -> dict[str, Tensor]:
        """Return the rewards of B prompts' completions, the G of one prompt side by side.

        Args:
            examples: (B * G) int64, on any device: what each completion's prompt is, by the number the loader gave it.
            completions: Their texts, without special tokens.
            step: Optimizer steps of the run so far, for rewards that change with time.

        Returns:
            By name, (B * G) floating-point, on any device: "total", which is trained on; all others are logged beside it.
        """
        ...
