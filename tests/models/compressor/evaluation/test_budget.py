"""Everybody has the same number of tokens, to the token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.models.compressor.evaluation.subject import kept_tokens, top_k


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    keep=st.floats(0.01, 1.0),
    levels=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_each_text_keeps_exactly_its_budget_and_never_a_pad(lengths, keep, levels, seed):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    scores = torch.randint(levels, mask.shape, generator=torch.Generator().manual_seed(seed)).float()
    scores = scores.masked_fill(~mask, torch.inf)

    kept = top_k(scores, mask=mask, keep=keep, seed=seed)

    assert kept.sum(1).tolist() == [round(keep * length) for length in lengths]
    assert not (kept & ~mask).any()


def test_the_tokens_of_highest_score_stay():
    scores = torch.tensor([[0.1, 0.9, -torch.inf, 0.5]])

    assert top_k(scores, mask=torch.ones(1, 4, dtype=torch.bool), keep=0.5).tolist() == [[False, True, False, True]]


def test_ties_are_drawn_by_the_seed_and_are_the_same_in_any_batch():
    alone = top_k(torch.zeros(1, 30), mask=torch.ones(1, 30, dtype=torch.bool), keep=0.5, seed=4)
    mask = torch.arange(50) < torch.tensor([[50], [30]])
    beside = top_k(torch.zeros(2, 50), mask=mask, keep=0.5, seed=4)
    other = top_k(torch.zeros(1, 30), mask=torch.ones(1, 30, dtype=torch.bool), keep=0.5, seed=5)

    assert beside[1, :30].equal(alone[0])
    assert not other.equal(alone)
    assert not alone[0, :15].all()  # no cut of the prefix


@pytest.mark.parametrize("keep", [0, -0.1, 1.5, True, "half"])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(ValueError, match="is not a share of the tokens"):
        kept_tokens(10, keep=keep)


def test_a_score_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        top_k(torch.tensor([[torch.nan, 1.0]]), mask=torch.ones(1, 2, dtype=torch.bool), keep=0.5)
