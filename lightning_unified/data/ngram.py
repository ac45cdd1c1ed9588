"""Interpolated modified Kneser-Ney n-gram models: the baseline of a language model.

The models are counted on the training tokens and evaluated on the same targets as the network. A target's context is the one or
two tokens before it in its row. At the start of a row, a boundary mark replaces missing tokens.
"""

import math
from collections.abc import Iterable

import numpy as np

__all__ = ["NGram", "perplexity"]

_Rows = Iterable[tuple[np.ndarray, np.ndarray]]


class _Level:
    """Counts of n-grams of one length, discounted; a context and a token are one int64 key each.

    Modified Kneser-Ney subtracts a discount D(c) from each count c, different for c = 1, 2 and more. The subtracted mass of a
    context goes to the next shorter n-gram.

    Source:
        Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", eq. 26 and 27.
    """

    def __init__(self, contexts: np.ndarray, tokens: np.ndarray, *, num_symbols: int) -> None:
        """Count the n-grams.

        Args:
            contexts: Key of the context of each n-gram, in base `num_symbols`.
            tokens: The token that followed.
            num_symbols: Number of tokens, plus one for the boundary mark.
        """
        self._base = num_symbols
        self.keys, counts = np.unique(contexts * num_symbols + tokens, return_counts=True)
        discounts = _discounts(counts)
        taken = discounts[np.minimum(counts, 3)]
        self._kept = counts - taken
        self._contexts, inverse = np.unique(self.keys // num_symbols, return_inverse=True)
        self._totals = np.bincount(inverse, weights=counts)
        self._given = np.bincount(inverse, weights=taken) / self._totals

    def interpolate(self, contexts: np.ndarray, tokens: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return p(token | context), given p of the same tokens at the lower level."""
        place = _find(self._contexts, contexts)
        known = place >= 0
        key = _find(self.keys, contexts * self._base + tokens)
        own = np.where(key >= 0, self._kept[key], 0.0) / np.where(known, self._totals[place], 1.0)
        return np.where(known, own + self._given[place] * lower, lower)


class NGram:
    """A language model of `order` tokens; its probabilities sum to one over the vocabulary.

    The lowest level is a unigram model of continuation counts, mixed with the uniform distribution: no token has probability
    zero, seen or not.

    Args:
        rows: Ids and labels of the training rows; only targets (label != -100) are counted.
        vocab_size: Ids are below it.
        order: 1, 2 or 3.

    Raises:
        ValueError: If there is no target, or `order` is not 1, 2 or 3.
    """

    def __init__(self, rows: _Rows, *, vocab_size: int, order: int) -> None:
        if order not in {1, 2, 3}:
            raise ValueError(f"order={order}; an n-gram model here has 1, 2 or 3 tokens.")
        history, targets = _events(rows, boundary=vocab_size)
        if not len(targets):
            raise ValueError("no row has a target (a label other than -100): nothing can be counted.")
        self.vocab_size, self.order = vocab_size, order
        self._num_symbols = vocab_size + 1
        self._levels: list[_Level] = []
        for length in range(order, 0, -1):
            contexts = self._contexts(history, length)
            level = _Level(contexts, targets, num_symbols=self._num_symbols)
            self._levels.insert(0, level)
            # the next level counts the different contexts of a token, not its occurrences
            targets = level.keys % self._num_symbols
            tail = level.keys // self._num_symbols
            history = np.stack([np.full_like(tail, vocab_size), tail % self._num_symbols], axis=1)

    def log_probabilities(self, rows: _Rows) -> np.ndarray:
        """Return the natural logarithm of the probability of every target, in order."""
        history, targets = _events(rows, boundary=self.vocab_size)
        values = np.full(len(targets), 1.0 / self.vocab_size)
        for length, level in enumerate(self._levels, start=1):
            values = level.interpolate(self._contexts(history, length), targets, values)
        return np.log(values)

    def _contexts(self, history: np.ndarray, length: int) -> np.ndarray:
        if length == 1:
            return np.zeros(len(history), dtype=np.int64)
        return history[:, 1] if length == 2 else history[:, 0] * self._num_symbols + history[:, 1]


def perplexity(model: NGram, rows: _Rows) -> float:
    """Return exp of the mean negative log-probability of the targets in `rows`.

    Raises:
        ValueError: If there is no target.
    """
    values = model.log_probabilities(rows)
    if not len(values):
        raise ValueError("no row has a target (a label other than -100): there is no perplexity.")
    return math.exp(-float(values.mean()))


def _events(rows: _Rows, *, boundary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two tokens before each target, shape (N, 2), and the targets, shape (N,)."""
    histories, targets = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for ids, labels in rows:
        padded = np.concatenate([[boundary, boundary], ids]).astype(np.int64)
        places = np.flatnonzero(labels >= 0)
        histories.append(np.stack([padded[places], padded[places + 1]], axis=1))
        targets.append(labels[places].astype(np.int64))
    return np.concatenate(histories), np.concatenate(targets)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return D(0..3), estimated from the numbers of n-grams that occur 1 to 4 times.

    D is 1/2 where these numbers are too small.
    """
    once, twice, thrice, four = (int((counts == number).sum()) for number in (1, 2, 3, 4))
    if not (once and twice):
        return np.array([0.0, 0.5, 0.5, 0.5])
    rate = once / (once + 2 * twice)
    third = 2 - 3 * rate * thrice / twice
    fourth = 3 - 4 * rate * four / thrice if thrice else third
    # a discount of zero would leave no probability for unseen tokens
    return np.array(
        [0.0, np.clip(1 - 2 * rate * twice / once, 0.1, 1), np.clip(third, 0.1, 2), np.clip(fourth, 0.1, 3)]
    )


def _find(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each value in the sorted array `known`, -1 for a missing one."""
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, place, -1)
