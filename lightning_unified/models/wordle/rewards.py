"""Rewards of answers, and Wordle as a task of GRPO.

An answer without the required form gets none, and no answer gets more than the secret.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.state import MAX_TURNS, State
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.prompts import STOP, parse

__all__ = ["COMPONENTS", "Example", "Reward", "WordleTask"]

COMPONENTS: tuple[str, ...] = ("format", "valid", "consistent", "entropy", "solved")


class Example(NamedTuple):
    """The facts that decide the reward of an answer to one prompt.

    Attributes:
        secret: The secret.
        state: The game before the answer.
        opening: The part of the answer that the prompt ends with.
    """

    secret: str
    state: State
    opening: str = ""


class Reward:
    """Reward one answer to one state.

    All components are 0 unless the answer has the required form and ends with its guess. Otherwise they are, each times its weight:

    - `format`: 1;
    - `valid`: 1 for a word of the list;
    - `consistent`: 1 for a word that agrees with all feedback so far;
    - `entropy`: for a consistent word, its expected share of the unknown information (`Patterns.gain`), 0 for the last guess;
    - `solved`: 1 for the secret.

    A word that contradicts the feedback gets no `entropy`. Otherwise, a policy that seldom finds a consistent word would learn one
    informative word for most states.

    The secret gets every component except `entropy` in full. It has the highest reward in every state if `solved` pays at least as
    much as `entropy` can, which is checked.

    Args:
        words: The list.
        patterns: Its feedback table.
        format: Weight of the form.
        valid: Weight of a word of the list.
        consistent: Weight of agreement with the feedback.
        entropy: Weight of the expected information.
        solved: Weight of the secret.
        entropy_from_step: `entropy` is 0 before this training step.

    Raises:
        ValueError: If a weight is negative, or entropy could pay more than the secret.
    """

    def __init__(
        self,
        words: WordList,
        patterns: Patterns,
        *,
        format: float = 0.1,  # noqa: A002 - a component's weight is named as the component
        valid: float = 0.1,
        consistent: float = 0.5,
        entropy: float = 0.3,
        solved: float = 1.0,
        entropy_from_step: int = 0,
    ) -> None:
        weights = dict(zip(COMPONENTS, (format, valid, consistent, entropy, solved), strict=True))
        negative = [f"{name}={weight}" for name, weight in weights.items() if weight < 0]
        if negative:
            raise ValueError(f"a reward must not be negative: {', '.join(negative)}; take 0 to leave a component out.")
        if entropy > solved:
            raise ValueError(
                f"entropy={entropy} is more than solved={solved}: a word that is not the secret could be paid more than the "
                "secret; lower the one or raise the other."
            )
        self.words = words
        self.patterns = patterns
        self.weights = weights
        self.entropy_from_step = entropy_from_step
        self._last: tuple[State, NDArray[np.bool_]] | None = None  # a group scores one state many times in a row

    def __call__(self, secret: str, state: State, completion: str, *, step: int = 0) -> dict[str, float]:
        """Return each of `COMPONENTS`, and their sum as "total".

        Args:
            secret: An answer of the list that the state allows.
            state: The game before this answer.
            completion: The model's text, the stop text included.
            step: The training step, for `entropy_from_step`.
        """
        answer = parse(completion)
        paid = dict.fromkeys((*COMPONENTS, "total"), 0.0)
        if not answer.format_ok or answer.trailing or answer.guess is None:
            return paid
        shares = {"format": 1.0, **self._of_word(answer.guess, secret=secret, state=state, step=step)}
        paid.update({name: self.weights[name] * share for name, share in shares.items()})
        paid["total"] = sum(paid[name] for name in COMPONENTS)
        return paid

    def _of_word(self, guess: str, *, secret: str, state: State, step: int) -> dict[str, float]:
        if guess not in self.words.index:
            return {}
        agrees = state.allows(guess)
        is_time = step >= self.entropy_from_step and len(state.turns) + 1 < MAX_TURNS
        matters = agrees and is_time and self.weights["entropy"] > 0
        return {
            "valid": 1.0,
            "consistent": float(agrees),
            "entropy": self.patterns.gain(guess, self._candidates(state)) if matters else 0.0,
            "solved": float(guess == secret),
        }

    def _candidates(self, state: State) -> NDArray[np.bool_]:
        if self._last is None or self._last[0] != state:
            self._last = state, self.patterns.candidates(state.turns)
        return self._last[1]


class WordleTask:
    """Reward completions by the number of their prompt, after the data has set the prompts.

    Args:
        weights: Keyword arguments of `Reward`.
    """

    stop = STOP

    def __init__(self, **weights: float) -> None:
        self._weights = weights
        self._reward: Reward | None = None
        self._examples: Sequence[Example] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WordleTask":
        return self  # a copy of the module uses the same words

    def take(self, words: WordList, *, patterns: Patterns, examples: Sequence[Example]) -> None:
        """Set the words of the game, and the prompts by their numbers.

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
            reward(one.secret, one.state, one.opening + text, step=step)
            for one, text in zip(asked, completions, strict=True)
        ]
        return {
            name: torch.tensor([one[name] for one in paid], dtype=torch.float32, device=examples.device)
            for name in (*COMPONENTS, "total")
        }
