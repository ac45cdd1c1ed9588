"""What completions of a Wordle prompt are worth, as `models.grpo` asks for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.prompts import STOP
from lightning_unified.models.wordle.rewards import COMPONENTS, Reward

__all__ = ["WordleTask"]


class WordleTask:
    """Judges completions by the number of their prompt, once the data has said what the prompts are.

    Args:
        weights: As keyword arguments of `rewards.Reward`.
    """

    stop = STOP

    def __init__(self, **weights: float) -> None:
        self._weights = weights
        self._reward: Reward | None = None
        self._examples: Sequence[tuple[str, State]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WordleTask":
        return self  # a copy of the module judges by the same words

    def take(self, words: WordList, *, patterns: Patterns, examples: Sequence[tuple[str, State]]) -> None:
        """Take the words of the game, and secret and state of each prompt by its number.

        Raises:
            ValueError: If the weights make no sense.
        """
        self._reward = Reward(words, patterns, **self._weights)  # pyright: ignore[reportArgumentType]
        self._examples = examples

    def rewards(self, examples: Tensor, completions: Sequence[str], *, step: int = 0) -> dict[str, Tensor]:
        """Return the components and their sum as "total", each (B · G) float32 on the device of `examples` (B · G).

        Raises:
            RuntimeError: If no data has said what the prompts are.
        """
        if self._reward is None:
            raise RuntimeError("nobody has said what the prompts are; train with WordleData, or call take().")
        reward, asked = self._reward, [self._examples[number] for number in examples.tolist()]
        paid = [
            reward(secret, state, text, step=step) for (secret, state), text in zip(asked, completions, strict=True)
        ]
        return {
            name: torch.tensor([one[name] for one in paid], dtype=torch.float32, device=examples.device)
            for name in (*COMPONENTS, "total")
        }
