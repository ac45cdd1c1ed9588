"""Wordle as a task of GRPO: rewards of completions."""

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
    """Reward completions by the number of their prompt, after the data has set the prompts.

    Args:
        weights: Keyword arguments of `rewards.Reward`.
    """

    stop = STOP

    def __init__(self, **weights: float) -> None:
        self._weights = weights
        self._reward: Reward | None = None
        self._examples: Sequence[tuple[str, State]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WordleTask":
        return self  # a copy of the module uses the same words

    def take(self, words: WordList, *, patterns: Patterns, examples: Sequence[tuple[str, State]]) -> None:
        """Set the words of the game, and each prompt's secret and state by its number.

        Raises:
            ValueError: If the weights make no sense.
        """
        self._reward = Reward(words, patterns, **self._weights)  # pyright: ignore[reportArgumentType]
        self._examples = examples

    def rewards(self, examples: Tensor, completions: Sequence[str], *, step: int = 0) -> dict[str, Tensor]:
        """Return the components and their sum as "total", each (B · G) float32.

        The device is that of `examples` (B · G).

        Raises:
            RuntimeError: If no data has set the prompts.
        """
        if self._reward is None:
            raise RuntimeError("the prompts are not set; train with WordleData, or call take().")
        reward, asked = self._reward, [self._examples[number] for number in examples.tolist()]
        paid = [
            reward(secret, state, text, step=step) for (secret, state), text in zip(asked, completions, strict=True)
        ]
        return {
            name: torch.tensor([one[name] for one in paid], dtype=torch.float32, device=examples.device)
            for name in (*COMPONENTS, "total")
        }
