"""Feedback of a guess as one number with five base-3 digits."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_unified.models.wordle.game.words import LENGTH

__all__ = ["CODES", "GRAY", "GREEN", "SOLVED", "YELLOW", "code_of", "feedback", "feedback_row", "marks"]

GRAY, YELLOW, GREEN = range(3)
CODES = 3**LENGTH
SOLVED = CODES - 1  # all green


@lru_cache(maxsize=1 << 16)
def feedback(guess: str, secret: str) -> int:
    """Return the code (0 to 242) of the marks of `guess` for `secret`.

    Letters in place are marked first. The others follow from left to right: a letter is yellow if the secret has a copy of it that no
    other letter of the guess has taken. A letter guessed twice but present once is marked once.
    """
    found = [GREEN if letter == right else GRAY for letter, right in zip(guess, secret, strict=True)]
    left = [right for mark, right in zip(found, secret, strict=True) if mark != GREEN]
    for place, letter in enumerate(guess):
        if found[place] != GREEN and letter in left:
            found[place] = YELLOW
            left.remove(letter)
    return code_of(found)


def code_of(marks: Sequence[int]) -> int:
    """Return the code of five marks; the first letter's is the lowest digit."""
    return sum(mark * 3**place for place, mark in enumerate(marks))


def marks(code: int) -> tuple[int, ...]:
    """Return the five marks of a code, each `GRAY`, `YELLOW` or `GREEN`."""
    return tuple(code // 3**place % 3 for place in range(LENGTH))


def feedback_row(guess: NDArray[np.uint8], secrets: NDArray[np.uint8], counts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes (A,) of one guess against many secrets at once.

    Args:
        guess: Letters (5,) of the guess.
        secrets: Letters (5, A) of the secrets.
        counts: Count of each letter in each secret (26, A).
    """
    green = secrets == guess[:, None]
    codes = np.zeros(secrets.shape[1], dtype=np.uint8)
    for place, letter in enumerate(guess):
        same = guess == letter
        copies = counts[letter] - green[same].sum(0, dtype=np.uint8)  # copies without a green mark
        earlier = (~green[:place][same[:place]]).sum(
            0, dtype=np.uint8
        )  # same letter earlier in the guess, which takes a copy first
        yellow = ~green[place] & (copies > earlier)
        codes += (GREEN * green[place] + yellow).astype(np.uint8) * np.uint8(3**place)
    return codes
