"""Which answers are still possible, and how much a guess would tell: equality of feedback, looked up in a table."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_unified.models.wordle.game.feedback import CODES, feedback_row
from lightning_unified.models.wordle.game.state import Turn
from lightning_unified.models.wordle.game.words import WordList

__all__ = ["Patterns", "expected_bits"]


class Patterns:
    """The code of every guess against every answer: rows are computed when first asked for, and kept (N × A bytes at most).

    Args:
        words: N guesses and A answers.
    """

    def __init__(self, words: WordList) -> None:
        self.words = words
        self._secrets = np.ascontiguousarray(words.answer_letters.T)
        self._counts = np.stack([(self._secrets == letter).sum(0, dtype=np.uint8) for letter in range(26)])
        self._table = np.empty((len(words.guesses), len(words.answers)), dtype=np.uint8)
        self._known = np.zeros(len(words.guesses), dtype=bool)

    def row(self, guess: str) -> NDArray[np.uint8]:
        """Return the codes (A,) of a guess against every answer.

        Raises:
            ValueError: If the word may not be guessed.
        """
        place = self.words.index.get(guess)
        if place is None:
            raise ValueError(f"{guess!r} is not in the list of {len(self.words.guesses)} words that may be guessed.")
        return self._row(place)

    def table(self) -> NDArray[np.uint8]:
        """Return the codes (N, A) of all guesses; the first call computes what is missing."""
        for place in np.flatnonzero(~self._known):
            self._row(place)
        return self._table

    def candidates(self, turns: Sequence[Turn]) -> NDArray[np.bool_]:
        """Return which answers (A,) would have given exactly the feedback of these turns."""
        possible = np.ones(len(self.words.answers), dtype=bool)
        for turn in turns:
            possible &= self.row(turn.guess) == turn.code
        return possible

    def gain(self, guess: str, candidates: NDArray[np.bool_]) -> float:
        """Return how much of what is not known a guess is expected to tell: 0 nothing, 1 everything.

        That is the entropy of its feedback over the candidates, all equally likely, divided by log2 of their number; 0 where at
        most one candidate is left.
        """
        left = int(candidates.sum())
        if left <= 1:
            return 0.0
        parts = np.bincount(self.row(guess)[candidates], minlength=CODES)
        return float(expected_bits(parts) / np.log2(left))

    def _row(self, place: int | np.intp) -> NDArray[np.uint8]:
        if not self._known[place]:
            self._table[place] = feedback_row(self.words.letters[place], self._secrets, self._counts)
            self._known[place] = True
        return self._table[place]


def expected_bits(parts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the entropy in bits of sizes (..., K) of the parts into which a guess's feedback divides the candidates."""
    total = parts.sum(-1)
    weighed = parts * np.log2(np.maximum(parts, 1))
    return np.log2(total) - weighed.sum(-1) / total
