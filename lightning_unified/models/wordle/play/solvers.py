"""Two baseline players: most informative guess, and random consistent guess."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_unified.models.wordle.game.candidates import Patterns, expected_bits
from lightning_unified.models.wordle.game.feedback import CODES
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.prompts import completion

__all__ = ["EntropyGreedy", "RandomConsistent", "Solver"]

_CELLS = 1 << 22  # codes counted in one pass: 32 MiB of indices


class Solver(ABC):
    """A rule-based player. Unlike a language model, it knows the list of possible secrets.

    Args:
        patterns: The feedback table of the words.
    """

    def __init__(self, patterns: Patterns) -> None:
        self.patterns = patterns

    @abstractmethod
    def guess(self, state: State) -> str:
        """Return the next guess.

        Raises:
            ValueError: If no answer of the list agrees with the state.
        """

    def answers(self, states: Sequence[State]) -> list[str]:
        """Return completions, as a `games.Player` does."""
        return [completion(state, self.guess(state)) for state in states]

    def _candidates(self, state: State) -> NDArray[np.bool_]:
        candidates = self.patterns.candidates(state.turns)
        if not candidates.any():
            raise ValueError(
                f"no answer of the list agrees with the feedback to {', '.join(turn.guess for turn in state.turns)}; "
                "the secret must be one of the answers."
            )
        return candidates


class EntropyGreedy(Solver):
    """Solver that guesses the allowed word with the largest feedback entropy.

    Among equal words it prefers a possible secret, else the first of the list. The first guess takes about a second on the full list,
    for the feedback table; guesses are cached.
    """

    def __init__(self, patterns: Patterns) -> None:
        super().__init__(patterns)
        self._found: dict[State, str] = {}

    @override
    def guess(self, state: State) -> str:
        if state not in self._found:
            self._found[state] = self._best(state)
        return self._found[state]

    def _best(self, state: State) -> str:
        words = self.patterns.words
        candidates = self._candidates(state)
        left = np.flatnonzero(candidates)
        if len(left) <= 2:
            return words.answers[left[0]]
        bits = self._bits(left)
        # rounded, so that equal words stay equal for any order of summation
        equals = np.flatnonzero(bits.round(9) == bits.round(9).max())
        possible = {words.answers[place] for place in left}
        best = [words.guesses[place] for place in equals]
        return next((word for word in best if word in possible), best[0])

    def _bits(self, left: NDArray[np.intp]) -> NDArray[np.float64]:
        codes = self.patterns.table()[:, left]
        rows = max(1, _CELLS // max(len(left), CODES))
        blocks = (codes[start : start + rows] for start in range(0, len(codes), rows))
        return np.concatenate([expected_bits(_parts(block)) for block in blocks])


class RandomConsistent(Solver):
    """Solver that draws a guess uniformly from the answers that agree with all feedback.

    Args:
        patterns: The feedback table of the words.
        seed: Makes the games repeatable.
    """

    def __init__(self, patterns: Patterns, *, seed: int = 0) -> None:
        super().__init__(patterns)
        self._random = np.random.default_rng(seed)

    @override
    def guess(self, state: State) -> str:
        return self.patterns.words.answers[self._random.choice(np.flatnonzero(self._candidates(state)))]


def _parts(codes: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Count the codes (n, A) of each row: (n, 243)."""
    offsets = np.arange(len(codes))[:, None] * CODES
    return np.bincount((codes + offsets).ravel(), minlength=len(codes) * CODES).reshape(-1, CODES)
