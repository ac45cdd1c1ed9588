"""Prepared rows of labelled tokens: places, targets and their number, packed or not."""

import torch

from lightning_unified.models.causal_lm.labelled_rows import labelled
from tests.support.grpo.training import traces


def test_a_batch_keeps_the_labelled_tokens_alone():
    tokens, labels = (traces()[name] for name in ("tokens", "labels"))
    found = labelled(tokens, labels)
    scored = found["targets"] != -100

    assert found["total"] == int((labels != -100).sum())
    assert scored.sum(1).tolist() == [3, 4, 7, 2]
    assert torch.equal(found["targets"][scored], labels[labels != -100])
    assert found["places"].max(1).values.tolist() == [3, 7, 6, 4]
    assert found["targets"].shape == (4, 7)


def test_several_answers_of_a_row_leave_out_what_lies_between_them():
    tokens = torch.arange(10, 18)[None]
    labels = torch.tensor([[-100, 11, -100, -100, -100, 15, 16, -100]])
    found = labelled(tokens, labels)

    assert found["places"].tolist() == [[0, 4, 5]]
    assert found["targets"].tolist() == [[11, 15, 16]]


def test_columns_behind_the_last_label_are_left_out_in_steps_of_sixteen():
    tokens = torch.arange(100)[None]
    labels = torch.full_like(tokens, -100)
    labels[0, 16] = 16

    assert labelled(tokens, labels)["tokens"].shape == (1, 32)


def test_a_first_token_cannot_be_predicted():
    tokens = torch.arange(1, 9).view(2, 4)
    found = labelled(tokens, tokens.clone())

    assert found["total"] == 6
    assert found["targets"].tolist() == [[2, 3, 4], [6, 7, 8]]


def test_the_first_token_of_a_packed_sequence_cannot_be_predicted_either():
    tokens = torch.arange(1, 6)[None]
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    found = labelled(tokens, tokens.clone(), positions)

    assert found["targets"].tolist() == [[2, 4, 5]]
    assert found["places"].tolist() == [[0, 2, 3]]
    assert torch.equal(found["positions"], positions)


def test_a_batch_without_a_label_has_no_terms():
    found = labelled(torch.ones(2, 4, dtype=torch.int64), torch.full((2, 4), -100))

    assert found["total"] == 0
    assert (found["targets"] == -100).all()


def test_without_values_every_token_but_the_first_is_scored():
    tokens = torch.empty(3, 5, dtype=torch.int64, device="meta")
    found = labelled(tokens, tokens)

    assert found["places"].shape == found["targets"].shape == (3, 4)
    assert found["total"] == 12
