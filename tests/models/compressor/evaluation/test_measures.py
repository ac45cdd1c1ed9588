"""Measures of dropped tokens, of the continuation, and of restored words.

Tokens are measured after reconstruction; the continuation follows the kept text.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.models.compressor.evaluation import measures, reconstruction, timing
from lightning_unified.models.compressor.evaluation.pieces import batches, divide
from lightning_unified.models.compressor.evaluation.reconstruction import rouge_l
from lightning_unified.models.compressor.module import Compressor


@pytest.fixture
def batch(subject, texts):
    pieces = divide(texts[:3], encoder=subject.tokenizer, length=24, continuation=8, per_document=2)
    return next(batches(pieces, size=8))


def test_only_dropped_tokens_are_scored_and_pads_never(subject, batch):
    keep = batch.mask & (torch.arange(batch.ids.shape[1]) >= 4)  # two whole pairs are dropped

    found = measures.measure(subject, batch, keep=keep)

    assert found["dropped_cross_entropy"].counts == [4] * len(batch.ids)
    assert found["dropped_cross_entropy"].sums == pytest.approx([4 * math.log(64)] * len(batch.ids))
    assert found["kept_ratio"].sums == [count - 4 for count in found["kept_ratio"].counts]


def test_one_of_each_pair_gives_the_whole_text_back(subject, batch):
    keep = batch.mask & (subject.keep_logits(batch.ids, batch.mask) > 0)

    found = measures.measure(subject, batch, keep=keep)

    assert found["rouge_l"].sums == [1.0] * len(batch.ids)
    assert max(found["dropped_cross_entropy"].sums) < 1e-6
    assert max(found["continuation_cross_entropy"].sums) < 1e-6


def test_a_reconstruction_never_reads_a_dropped_token(subject, batch):
    keep = batch.mask & (torch.arange(batch.ids.shape[1]) < 8)
    scrambled = torch.where(keep, batch.ids, 7)

    one = reconstruction.greedy(subject, batch.ids, keep=keep, mask=batch.mask)
    other = reconstruction.greedy(subject, scrambled, keep=keep, mask=batch.mask)

    assert one.equal(other)
    assert one[keep].equal(batch.ids[keep])


class _InOrder:
    """Writes a token as a function of the one written before it: the next number."""

    def __init__(self):
        self.passes = 0

    def reconstruct(self, ids, keep, mask):
        self.passes += 1
        before = torch.nn.functional.pad(ids[:, :-1], (1, 0))
        return torch.nn.functional.one_hot((before * 3 + 1) % 11, 11).float()


def test_a_model_that_writes_in_order_gives_what_token_by_token_would():
    writer, ids = _InOrder(), torch.tensor([[5, 9, 9, 9, 2, 9]])
    keep = torch.tensor([[True, False, False, False, True, False]])

    written = reconstruction.greedy(writer, ids, keep=keep, mask=torch.ones_like(keep))
    guessed = reconstruction.greedy(writer, ids, keep=keep, mask=torch.ones_like(keep), guess=ids + 1)

    assert written.tolist() == guessed.tolist() == [[5, 5, 5, 5, 2, 7]]
    assert writer.passes <= 12


@pytest.mark.parametrize("reading", ["infill", "copy"])
def test_what_is_written_by_a_compressor_is_what_token_by_token_would_be(reading):
    module = Compressor(preset="compressor-tiny", reading=reading).eval()
    torch.nn.init.normal_(module.codec.reader.position_embedding.weight)  # or every place says the same
    ids = torch.randint(9, 300, (2, 12))
    mask = torch.arange(12) < torch.tensor([[12], [9]])
    keep = mask & (torch.rand(2, 12) < 0.4)

    written = reconstruction.greedy(module, ids, keep=keep, mask=mask)

    slow = ids * keep
    for place in range(12):
        with torch.no_grad():
            likeliest = module.reconstruct(slow, keep, mask).argmax(-1)
        slow[:, place] = torch.where(mask & ~keep, likeliest, slow)[:, place]
    reconstruction.check_blind(module, ids, keep=keep, mask=mask)
    assert written.equal(slow)
    assert written[0].unique().numel() > 6


def test_only_a_reconstructor_that_sees_dropped_tokens_is_refused():
    class Copier:
        def reconstruct(self, ids, keep, mask):
            return torch.nn.functional.one_hot(ids, 11).float()

    ids, keep = torch.arange(6)[None], torch.tensor([[True, False] * 3])
    mask = torch.ones_like(keep)

    reconstruction.check_blind(_InOrder(), ids, keep=keep, mask=mask)
    with pytest.raises(RuntimeError, match="can see dropped tokens"):
        reconstruction.check_blind(Copier(), ids, keep=keep, mask=mask)


def test_the_full_context_is_scored_where_the_continuation_stands(subject, texts):
    pieces = divide(texts[-1:], encoder=subject.tokenizer, length=25, continuation=7, per_document=1)

    found = measures.full_context(subject, next(batches(pieces, size=1)))

    # tokens 25 to 31: four are the second of a pair, which its first tells, and three are the first
    assert found["continuation_cross_entropy"].sums == pytest.approx([3 * math.log(64)])
    assert found["continuation_cross_entropy"].counts == [7]
    assert found["text_cross_entropy"].sums == pytest.approx([12 * math.log(64)])
    assert found["text_cross_entropy"].counts == [24]


def test_kept_tokens_are_moved_together_in_their_order():
    ids, keep = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]]).bool()

    squeezed, mask = timing.squeeze(ids, keep=keep)

    assert squeezed.tolist() == [[2, 4], [7, 0]]
    assert mask.tolist() == [[True, True], [True, False]]


def _slow_longest_common(first, second):
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if word == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@settings(max_examples=80, deadline=None)
@given(first=st.lists(st.sampled_from("abcd"), min_size=1), second=st.lists(st.sampled_from("abcd"), min_size=1))
def test_rouge_is_that_of_the_longest_common_subsequence(first, second):
    expected = 2 * _slow_longest_common(first, second) / (len(first) + len(second))

    assert rouge_l(" ".join(first), " ".join(second)) == pytest.approx(expected)


def test_rouge_knows_no_case_and_no_punctuation():
    assert rouge_l("The pump, leaks!", "the Pump leaks") == 1
    assert rouge_l("...", "a word") == 0
    assert rouge_l("...", "!") == 1
