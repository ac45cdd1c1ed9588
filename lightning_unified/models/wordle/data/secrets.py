"""Split the secrets into training and held-out ones."""

import numpy as np

from lightning_unified.models.wordle.game.words import WordList

__all__ = ["split_secrets"]


def split_secrets(words: WordList, *, held_out_fraction: float, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the answers at random into (train, held out), each in the order of the list.

    A held-out word is never the secret of a training game. It stays a word of the list, which players may guess.

    Args:
        words: The list.
        held_out_fraction: Share of the answers that are held out.
        seed: The same seed gives the same split.

    Raises:
        ValueError: If the fraction leaves either side empty.
    """
    count = round(held_out_fraction * len(words.answers))
    if not 0 < count < len(words.answers):
        raise ValueError(
            f"held_out_fraction={held_out_fraction} of {len(words.answers)} answers holds out {count}; "
            "take a fraction that leaves at least one word on either side."
        )
    held_out = set(np.random.default_rng(seed).permutation(len(words.answers))[:count].tolist())
    parts = ([], [])
    for place, word in enumerate(words.answers):
        parts[place in held_out].append(word)
    return tuple(parts[0]), tuple(parts[1])
