"""Baselines of a policy: token scores without training, or from the reader's language model.

Each is a function of a batch's ids and mask that returns (B, T) scores on the host; tokens with higher scores are kept first.
`subject.top_k` keeps the same number of tokens for all. They are counted on the training corpus, without held-out texts.

Source:
    LM surprisal: Li et al. 2023, "Compressing Context to Enhance Inference Efficiency of Large Language Models"
    (Selective Context), by tokens; they also offer phrases and sentences.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lightning_unified.data.ngram import NGram
from lightning_unified.models.compressor.evaluation.subject import Encoder, Subject

__all__ = ["Scorer", "frequency", "length", "lm_surprisal", "ngram_surprisal", "position", "random", "scorers"]

Scorer = Callable[[Tensor, Tensor], Tensor]


def scorers(subject: Subject, *, corpus: Sequence[Sequence[int]], vocabulary: int, seed: int = 0) -> dict[str, Scorer]:
    """Return all baselines by name.

    Args:
        subject: Its language model gives the LM surprisal, its tokenizer the texts of tokens.
        corpus: Token ids of the training texts, for frequencies and n-grams.
        vocabulary: Token ids are below it.
        seed: Draws the random scores.

    Raises:
        ValueError: If the corpus has no token.
    """
    return {
        "random": random(seed),
        "frequency": frequency(corpus, vocabulary=vocabulary),
        "length": length(subject.tokenizer),
        "position": position,
        "ngram_surprisal": ngram_surprisal(corpus, vocabulary=vocabulary),
        "lm_surprisal": lm_surprisal(subject),
    }


def random(seed: int) -> Scorer:
    """Return random scores that depend on the seed and the text, not on the batch."""
    return _text_by_text(lambda tokens: np.random.default_rng([seed, zlib.crc32(tokens.tobytes())]).random(len(tokens)))


def frequency(corpus: Sequence[Sequence[int]], *, vocabulary: int) -> Scorer:
    """Return -log of each token's share of the corpus: frequent tokens are dropped first.

    One is added to each count.

    Raises:
        ValueError: If the corpus has no token.
    """
    counts = np.zeros(vocabulary)
    for text in corpus:
        counts += np.bincount(np.asarray(text, dtype=np.int64), minlength=vocabulary)
    if not counts.any():
        raise ValueError("the corpus has no token; frequencies are counted on the training texts, give them.")
    table = torch.from_numpy(-np.log((counts + 1) / (counts.sum() + vocabulary)))
    return lambda ids, _mask: table[ids.cpu()]


def length(encoder: Encoder) -> Scorer:
    """Return the number of characters of the word that a token is part of: short words go first.

    A word begins where a token's text begins with white space, or the previous token's text ends with it. Long words carry more
    content: most short words are articles, prepositions and punctuation.
    """
    text_of = lru_cache(maxsize=None)(lambda token: encoder.decode([token]))
    return _text_by_text(lambda tokens: np.array(_word_lengths([text_of(int(token)) for token in tokens]), dtype=float))


def position(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the distance from the middle of the text: both ends are kept."""
    middle = (mask.sum(1, keepdim=True).cpu().double() - 1) / 2
    return (torch.arange(ids.shape[1]) - middle).abs()


def ngram_surprisal(corpus: Sequence[Sequence[int]], *, vocabulary: int) -> Scorer:
    """Return -log p(token | two tokens before) of a Kneser-Ney model of the corpus.

    Predictable tokens go first.
    """
    model = NGram([_row(text) for text in corpus], vocab_size=vocabulary, order=3)
    return _text_by_text(lambda tokens: -model.log_probabilities([_row(tokens)]))


def lm_surprisal(subject: Subject) -> Scorer:
    """Return -log p(token | all tokens before) by the subject's own language model.

    The first token gets the surprisal log V, as if all tokens were equally likely.
    """

    def score(ids: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            logits = subject.next_logits(ids, mask)
        surprisal = torch.full(ids.shape, math.log(logits.shape[-1]), dtype=torch.float64)
        surprisal[:, 1:] = functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none"
        ).cpu()
        return surprisal

    return score


def _text_by_text(values: Callable[[np.ndarray], np.ndarray]) -> Scorer:
    """Return a scorer that computes the values of one text at a time, without its pads."""

    def score(ids: Tensor, mask: Tensor) -> Tensor:
        scores = torch.zeros(ids.shape, dtype=torch.float64)
        for row, (tokens, count) in enumerate(zip(ids.cpu().numpy(), mask.sum(1).tolist(), strict=True)):
            scores[row, :count] = torch.from_numpy(values(tokens[:count]))
        return scores

    return score


def _row(tokens: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    row = np.asarray(tokens, dtype=np.int64)
    return row, row


def _word_lengths(texts: list[str]) -> list[int]:
    words: list[list[int]] = []
    for place, text in enumerate(texts):
        if not words or text[:1].isspace() or texts[place - 1][-1:].isspace():
            words.append([])
        words[-1].append(place)
    lengths = [0] * len(texts)
    for word in words:
        size = sum(len(texts[place].strip()) for place in word)
        for place in word:
            lengths[place] = size
    return lengths
