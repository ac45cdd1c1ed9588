"""Each baseline scores what it says it does, from a real corpus where it needs one."""

import math

import pytest
import torch

from lightning_unified.models.compressor.evaluation import baselines

CORPUS = [[1, 1, 1, 2, 2, 3], [1, 2, 4, 1, 2, 4]]
MASK = torch.tensor([[True] * 4, [True] * 3 + [False]])
IDS = torch.tensor([[1, 2, 4, 3], [9, 1, 2, 0]])


def test_the_most_frequent_token_scores_lowest_and_an_unseen_one_highest():
    scores = baselines.frequency(CORPUS, vocabulary=10)(IDS, MASK)

    assert scores[0, 0] < scores[0, 1] < scores[0, 2] < scores[0, 3] < scores[1, 0]
    assert scores[0, 0].item() == pytest.approx(-math.log(6 / 22))


def test_frequency_without_a_corpus_is_refused():
    with pytest.raises(ValueError, match="the corpus has no token"):
        baselines.frequency([[]], vocabulary=10)


def test_a_token_scores_the_length_of_the_word_it_is_part_of():
    class Syllables:
        texts = ("un", "cer", "tain", " a", " b", "c", ",")

        def decode(self, ids):
            return self.texts[ids[0]]

    ids = torch.tensor([[0, 1, 2, 3, 4, 5]])

    scores = baselines.length(Syllables())(ids, torch.ones(1, 6, dtype=torch.bool))

    assert scores.tolist() == [[9, 9, 9, 1, 2, 2]]


def test_position_keeps_both_ends_of_the_text_and_not_of_the_padding():
    scores = baselines.position(IDS, MASK)

    assert scores[0].tolist() == [1.5, 0.5, 0.5, 1.5]
    assert scores[1, :3].tolist() == [1, 0, 1]


def test_random_scores_depend_on_the_text_and_the_seed_but_not_on_the_batch():
    both, alone = baselines.random(3)(IDS, MASK), baselines.random(3)(IDS[1:, :3], MASK[1:, :3])

    assert both[1, :3].equal(alone[0])
    assert not both[0, :3].equal(both[1, :3])
    assert not both.equal(baselines.random(4)(IDS, MASK))


def test_ngram_surprisal_is_low_where_the_corpus_tells_what_follows():
    scores = baselines.ngram_surprisal(CORPUS, vocabulary=10)(IDS, MASK)

    assert scores[0, 2] < scores[0, 3]  # 1 2 4 is in the corpus, 2 4 3 is not
    assert (scores[MASK] > 0).all()


def test_lm_surprisal_is_what_the_language_model_gives_each_token(subject):
    ids = torch.tensor([[5, 6, 9, 10]])

    scores = baselines.lm_surprisal(subject)(ids, torch.ones(1, 4, dtype=torch.bool))

    assert scores[0, [0, 2]].tolist() == pytest.approx([math.log(64)] * 2)
    assert scores[0, [1, 3]].tolist() == pytest.approx([0, 0], abs=1e-6)
