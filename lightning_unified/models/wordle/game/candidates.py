"""Feedback table: the answers still possible, and the expected information of a guess."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_unified.models.wordle.game.feedback import CODES, feedback_row
from lightning_unified.models.wordle.game.state import Turn
from lightning_unified.models.wordle.game.words import WordList

__all__ = ["Patterns", "expected_bits"]


class Patterns:
    """Feedback codes of every guess for every answer.

    They are computed on demand and cached, in at most N × A bytes.

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
            ValueError: If the word is not an allowed guess.
        """
        place = self.words.index.get(guess)
        if place is None:
            raise ValueError(f"{guess!r} is not in the list of {len(self.words.guesses)} words that may be guessed.")
        return self._row(place)

    def table(self) -> NDArray[np.uint8]:
        """Return the codes (N, A) of all guesses; the first call computes missing rows."""
        for place in np.flatnonzero(~self._known):
            self._row(place)
        return self._table

    def candidates(self, turns: Sequence[Turn]) -> NDArray[np.bool_]:
        """Return whether each answer (A,) agrees with the feedback of all turns."""
        possible = np.ones(len(self.words.answers), dtype=bool)
        for turn in turns:
            possible &= self.row(turn.guess) == turn.code
        return possible

    def gain(self, guess: str, candidates: NDArray[np.bool_]) -> float:
        """Return a guess's expected share of the unknown information, from 0 to 1.

        It is the entropy of the feedback over equally likely candidates, divided by log2 of their number; 0 for at most one
        candidate.
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
    """Return the entropy in bits of the sizes (..., K) of the candidate sets for each feedback."""
    total = parts.sum(-1)
    weighed = parts * np.log2(np.maximum(parts, 1))
    return np.log2(total) - weighed.sum(-1) / total
