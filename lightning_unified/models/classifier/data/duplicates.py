"""Find copies and near copies of texts exactly, by an index of rare shingles.

Two texts are near copies if their sets of shingles (runs of three words, lowered) have a Jaccard similarity of at least 0.7: in a
tweet of 15 words that allows `RT @name:` before it, in an article a changed headline, in a posting an added line. Texts of at most
three words have a single shingle, so only copies of them are found.

The search neither samples nor hashes. A pair of that similarity must share one of the few rarest shingles of either text, so only
such pairs are compared (prefix filtering: Bayardo, Ma, Srikant, "Scaling up all pairs similarity search", WWW 2007).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SIMILARITY", "Copies", "find_copies"]

SIMILARITY = 0.7
"""Least Jaccard similarity of near copies."""

_SHINGLE = 3  # words; unrelated texts share runs of one or two


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Positions of the texts to leave out, ascending.

    Attributes:
        exact: Copies of a text that stays, apart from case and white space.
        near: Near copies of a text that stays.
        of: For each position in the two, the position of the text that stays.
    """

    exact: tuple[int, ...]
    near: tuple[int, ...]
    of: dict[int, int]


def find_copies(texts: Sequence[str], *, kept: int = 0) -> Copies:
    """Return the texts to leave out, so that the remaining texts contain no near copies.

    The first `kept` texts may be copies of each other. Texts are taken in order. A text stays unless it is a near copy of a text
    that stays already. A chain of near copies therefore never removes a text that is similar to none of the others.

    Args:
        texts: All of them; the order decides which of two copies stays.
        kept: The first `kept` texts stay in any case: an official test set is not changed.
    """
    shingles = _shingles(texts)
    index: dict[int, list[int]] = {}
    exact, near, of = [], [], {}
    for place, own in enumerate(shingles):
        # rounding must not raise the number of shingles that two similar texts share at least
        prefix = own[: len(own) - math.ceil(SIMILARITY * len(own) - 1e-9) + 1].tolist()
        if place >= kept:
            like = _like(own, prefix, index=index, shingles=shingles)
            if like is not None:
                of[place] = like
                same = texts[place].casefold().split() == texts[like].casefold().split()
                (exact if same else near).append(place)
                continue
        for shingle in prefix:
            index.setdefault(shingle, []).append(place)
    return Copies(exact=tuple(exact), near=tuple(near), of=of)


def _like(
    own: np.ndarray,
    prefix: list[int],
    *,
    index: dict[int, list[int]],
    shingles: Sequence[np.ndarray],
) -> int | None:
    """Return the most similar text in the index, the first of equals; None below `SIMILARITY`."""
    candidates = {place for shingle in prefix for place in index.get(shingle, ())}
    best, most = None, SIMILARITY
    for place in sorted(candidates):
        other = shingles[place]
        if min(len(own), len(other)) < most * max(len(own), len(other)):
            continue
        shared = len(np.intersect1d(own, other, assume_unique=True))
        alike = shared / (len(own) + len(other) - shared)
        if alike > most or (best is None and alike >= most):
            best, most = place, alike
    return best


def _shingles(texts: Sequence[str]) -> list[np.ndarray]:
    """Return each text's shingles as numbers in order of rarity: few texts have a small number.

    Two runs of words have the same number exactly if they are equal. A text without words has one shingle.
    """
    words: dict[str, int] = {"": 0}
    padded = []
    for text in texts:
        found = [words.setdefault(word, len(words)) for word in text.casefold().split()]
        padded.append(np.array(found + [0] * max(0, _SHINGLE - len(found)), dtype=np.int64))
    if not padded:
        return []
    flat = np.concatenate(padded)
    runs = flat[: len(flat) - _SHINGLE + 1]
    for later in range(1, _SHINGLE):
        _, runs = np.unique(runs, return_inverse=True)
        runs = runs * len(words) + flat[later : len(flat) - _SHINGLE + 1 + later]
    _, runs = np.unique(runs, return_inverse=True)
    lengths = np.array([len(ids) for ids in padded])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    sets = [np.unique(runs[start : start + size - _SHINGLE + 1]) for start, size in zip(starts, lengths, strict=False)]
    counts = np.bincount(np.concatenate(sets), minlength=int(runs.max()) + 1)
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.lexsort((np.arange(len(counts)), counts))] = np.arange(len(counts))
    return [np.sort(rank[own]) for own in sets]
