"""Kneser-Ney models are distributions and count exactly the targets.

A longer context lowers their loss.
"""

import math

import numpy as np
import pytest

from lightning_unified.data.ngram import NGram, perplexity

V = 12


def markov(length, seed):
    """A sequence in which the next token depends on the last two."""
    draw = np.random.default_rng(seed)
    ids = [0, 1]
    for _ in range(length):
        ids.append(int((ids[-1] * 3 + ids[-2] // 5) % 10) if draw.random() < 0.8 else int(draw.integers(10)))
    ids = np.array(ids, dtype=np.int32)
    labels = ids.copy()
    labels[0] = -100
    return ids, labels


def distribution(model, before=()):
    """p of every token after the tokens `before`."""
    rows = [(np.array([*before, token]), np.array([-100] * len(before) + [token])) for token in range(V)]
    return np.exp(model.log_probabilities(rows))


TRAIN, HELD_OUT = [markov(2000, 0)], [markov(500, 1)]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("before", [(), (3,), (3, 4), (0, 1), (11, 11), (V - 1, 4)])
def test_probabilities_sum_to_one_after_any_context(order, before):
    values = distribution(NGram(TRAIN, vocab_size=V, order=order), before)

    assert math.isclose(values.sum(), 1, rel_tol=1e-12)
    assert values.min() > 0


def test_they_sum_to_one_on_counts_too_few_to_estimate_a_discount():
    ids = np.array([1, 2, 1, 2, 1, 2], dtype=np.int32)
    values = distribution(NGram([(ids, ids)], vocab_size=V, order=3), (1, 2))

    assert math.isclose(values.sum(), 1, rel_tol=1e-12)


def test_looking_further_back_helps():
    unigram, bigram, trigram = (perplexity(NGram(TRAIN, vocab_size=V, order=order), HELD_OUT) for order in (1, 2, 3))

    assert V > unigram > bigram > trigram


def test_perplexity_is_that_of_the_distributions():
    model = NGram(TRAIN, vocab_size=V, order=3)
    ids, labels = HELD_OUT[0]
    by_hand = [
        math.log(distribution(model, ids[max(0, place - 2) : place])[ids[place]]) for place in range(1, len(ids))
    ]

    assert math.isclose(perplexity(model, [(ids, labels)]), math.exp(-sum(by_hand) / len(by_hand)), rel_tol=1e-9)


def test_only_targets_are_counted_and_judged():
    ids, labels = TRAIN[0]
    half = np.where(np.arange(len(labels)) % 2, labels, -100)

    assert len(NGram(TRAIN, vocab_size=V, order=2).log_probabilities([(ids, half)])) == (half != -100).sum()
    assert perplexity(NGram([(ids, half)], vocab_size=V, order=2), HELD_OUT) != perplexity(
        NGram(TRAIN, vocab_size=V, order=2), HELD_OUT
    )


def test_a_token_never_seen_has_a_probability():
    ids = np.array([1, V - 1], dtype=np.int32)

    assert math.isfinite(perplexity(NGram(TRAIN, vocab_size=V, order=3), [(ids, ids)]))


def test_the_continuation_count_and_not_the_frequency_rules_the_unigrams():
    # 5 is frequent but only ever follows 4; 6 is rarer and follows many: after an unknown context 6 is likelier
    ids = np.array([4, 5] * 20 + [1, 6, 2, 6, 3, 6, 7, 6, 8, 6], dtype=np.int32)
    model = NGram([(ids, ids)], vocab_size=V, order=2)

    assert distribution(model, (10,))[6] > distribution(model, (10,))[5]


def test_nothing_to_count_and_orders_unknown_are_refused():
    ids = np.array([1, 2], dtype=np.int32)
    with pytest.raises(ValueError, match="no row has a target"):
        NGram([(ids, np.full(2, -100))], vocab_size=V, order=2)
    with pytest.raises(ValueError, match="no row has a target"):
        perplexity(NGram(TRAIN, vocab_size=V, order=2), [])
    with pytest.raises(ValueError, match="order=4"):
        NGram(TRAIN, vocab_size=V, order=4)
