"""The built-in words, their table, and games that are under way."""

import numpy as np
import pytest

from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import read_words


@pytest.fixture(scope="session")
def words():
    return read_words("builtin")


@pytest.fixture(scope="session")
def patterns(words):
    return Patterns(words)


@pytest.fixture(scope="session")
def under_way(words):
    """Return 120 pairs of a secret and a state of 0 to 5 turns of random words.

    The two need not agree.
    """
    random = np.random.default_rng(8)
    games = []
    for number in range(120):
        secret, *guesses = (words.answers[place] for place in random.integers(len(words.answers), size=1 + number % 6))
        state = State()
        for guess in guesses:
            state = state.after(guess, secret)
        games.append((secret, state))
    return games
