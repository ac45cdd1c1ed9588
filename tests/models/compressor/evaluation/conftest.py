"""A compressor with a known solution.

Its texts are pairs, and one half of a pair determines the other.
"""

import pytest
import torch
from torch.nn import functional

LETTERS = "abcdefghijklmnopqrstuvwxyz "
VOCABULARY = 64
SURE = 30.0  # logit of what is known: its cross-entropy is 1e-11


class Letters:
    """One token a character; ids are places in LETTERS."""

    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[token] if token < len(LETTERS) else "?" for token in ids)


class Pairs:
    """Reads texts of pairs.

    The second letter follows from the first and the first from the second.

    It scores the first letter of each pair higher, reconstructs a letter if either of its pair is kept, and knows nothing
    else: uniform over the vocabulary. As a language model it knows the second letter of a pair after the first.
    """

    tokenizer = Letters()
    device = torch.device("cpu")
    trained_steps, global_step, text_length = 1, 0, 24

    def __init__(self):
        self.training = True
        self.passes = 0

    def train(self, mode=True):
        self.training = mode
        return self

    def keep_logits(self, ids, mask):
        places = torch.arange(ids.shape[1])
        return (places % 2 == 0).float().expand(ids.shape) + 0 * ids

    def reconstruct(self, ids, keep, mask):
        self.passes += 1
        keep = keep.bool()
        even = torch.arange(ids.shape[1]) % 2 == 0
        after, before = functional.pad(ids[:, 1:], (0, 1)), functional.pad(ids[:, :-1], (1, 0))
        after_kept, before_kept = functional.pad(keep[:, 1:], (0, 1)), functional.pad(keep[:, :-1], (1, 0))
        known = keep | torch.where(even, after_kept, before_kept)
        guess = torch.where(keep, ids, torch.where(even, after - 1, before + 1))
        return _sure(guess, known)

    def next_logits(self, ids, mask):
        even = (torch.arange(ids.shape[1]) % 2 == 0).expand(ids.shape)
        return _sure(ids + 1, even)

    def continue_logits(self, ids, keep, mask, continuation, continuation_mask):
        known = keep.float().sum(1, keepdim=True).expand(continuation.shape) >= 0.5 * mask.sum(1, keepdim=True)
        return _sure(continuation, known)


def _sure(guess, known):
    return SURE * functional.one_hot(guess.clamp(0, VOCABULARY - 1), VOCABULARY) * known.unsqueeze(-1)


@pytest.fixture
def subject():
    """Return the pairs' compressor."""
    return Pairs()


@pytest.fixture
def texts():
    """Return 12 documents of 20 to 64 random pairs."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 25, (20 + 4 * number,), generator=generator).tolist() for number in range(12)]
    return ["".join(LETTERS[first] + LETTERS[first + 1] for first in firsts) for firsts in drawn]
