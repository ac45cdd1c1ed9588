"""Copies are found exactly, as by comparing all pairs.

Each dropped text resembles a text that stays.
"""

import itertools

import numpy as np

from lightning_unified.models.classifier.data.duplicates import SIMILARITY, find_copies

LONG = "the quick brown fox jumps over the lazy dog while nobody in the old yard looks up from work"


def shingles(text):
    words = text.casefold().split()
    words += [""] * (3 - len(words))
    return {tuple(words[place : place + 3]) for place in range(len(words) - 2)}


def similarity(one, other):
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def random_texts(count=160, seed=0):
    """Texts of a few words, a third of them edited from others.

    Similarities of every size occur.
    """
    draw = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        words = [f"w{word}" for word in draw.integers(0, 40, draw.integers(1, 30))]
        if number % 3 == 2:
            words = texts[draw.integers(len(texts))].split()
            for _ in range(draw.integers(0, 4)):
                words[draw.integers(len(words))] = f"w{draw.integers(40)}"
        texts.append(" ".join(words))
    return texts


def test_kept_texts_are_no_near_copies_and_each_dropped_text_is_one_of_a_kept_text():
    texts = random_texts()
    copies = find_copies(texts)
    kept = [place for place in range(len(texts)) if place not in copies.of]

    assert all(similarity(texts[a], texts[b]) < SIMILARITY for a, b in itertools.combinations(kept, 2))
    assert copies.near
    assert all(similarity(texts[place], texts[copies.of[place]]) >= SIMILARITY for place in copies.of)
    assert set(copies.of.values()) <= set(kept)


def test_a_copy_but_for_case_and_white_space_is_exact_and_an_edited_one_is_near():
    copies = find_copies(
        [LONG, LONG.upper().replace(" ", "\n"), f"RT @fox: {LONG}", "Something else altogether, here."]
    )

    assert (copies.exact, copies.near) == ((1,), (2,))
    assert copies.of == {1: 0, 2: 0}


def test_the_texts_to_be_kept_stay_though_they_are_copies_and_take_out_later_ones():
    copies = find_copies([LONG, LONG, LONG], kept=2)

    assert copies.of == {2: 0}


def test_texts_too_short_for_a_shingle_are_copies_only_of_their_like():
    copies = find_copies([":)", ":(", "thank you", "thank you all", "", ":)"])

    assert copies.of == {5: 0}


def test_a_pair_exactly_at_the_threshold_is_a_near_copy():
    # seven shingles shared of ten in all: 8 and 9 of the two texts
    first = " ".join("abcdefghi") + " j"
    second = " ".join("abcdefghi") + " x y"
    assert similarity(first, second) == 0.7

    assert find_copies([first, second]).near == (1,)
