"""The record: all methods at one budget on the same documents.

It has intervals and paired tests.
"""

import json

import pytest
import torch

from lightning_unified.models.compressor.evaluation.evaluate import EvaluationOptions, evaluate
from lightning_unified.models.compressor.evaluation.pieces import divide
from lightning_unified.models.compressor.evaluation.report import plot

SMALL = {"length": 24, "continuation": 8, "per_document": 2, "resamples": 200, "repeats": 1}
BASELINES = {"random", "frequency", "length", "position", "ngram_surprisal", "lm_surprisal"}


@pytest.fixture
def record(subject, texts):
    return evaluate(subject, texts, corpus=texts, options=EvaluationOptions(**SMALL))


def _find(rows, **wanted):
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def test_every_method_is_there_at_every_budget_with_the_same_kept_ratio(record):
    methods = {row["method"] for row in record["rows"]}

    assert methods == BASELINES | {"policy"}
    for keep in (0.3, 0.5, 0.7, 0.9):
        ratios = {row["kept_ratio"]["mean"] for row in record["rows"] if row["keep"] == keep}
        assert len(ratios) == 1
        assert ratios.pop() == pytest.approx(keep, abs=0.03)


def test_the_policy_that_keeps_one_of_each_pair_wins_where_it_should(record):
    policy = _find(record["rows"], method="policy", keep=0.5)
    verdict = _find(record["policy_against"], baseline="random", keep=0.5, measure="dropped_cross_entropy")

    assert policy["dropped_cross_entropy"]["mean"] < 1e-6
    assert policy["rouge_l"]["mean"] == 1
    assert verdict["difference"]["high"] < 0
    assert verdict["p_value"] < 0.01
    assert verdict["intervals"] == "policy"


def test_it_is_said_where_the_policy_does_not_win(record):
    verdict = _find(record["policy_against"], baseline="lm_surprisal", keep=0.5, measure="dropped_cross_entropy")

    assert verdict["intervals"] == "overlap"  # the first of each pair is what surprises: both keep the same


def test_the_record_is_json_and_the_subject_is_as_it_was(record, subject, texts):
    subject.train(True)
    seen = []
    options = EvaluationOptions(keeps=[0.5], reconstruct=False, batch_size=1, **SMALL)
    evaluate(subject, texts[:2], corpus=texts, options=options, progress=lambda *numbers: seen.append(numbers))

    assert subject.training
    assert seen == [(1, 2), (2, 2)]
    assert json.loads(json.dumps(record)) == record
    assert record["documents"] == 12
    assert [row["keep"] for row in record["seconds"]] == [0.3, 0.5, 0.7, 0.9]


def test_a_budget_that_drops_nothing_is_refused():
    with pytest.raises(ValueError, match="drops nothing"):
        EvaluationOptions(keeps=[1.0])


def test_pieces_are_as_long_as_in_training_unless_lengths_are_given():
    assert EvaluationOptions().piece_lengths(64) == (64, 16)
    assert EvaluationOptions(length=3).piece_lengths(64) == (3, 1)
    assert EvaluationOptions(continuation=5).piece_lengths(64) == (64, 5)


def test_a_reconstructor_that_copies_what_was_dropped_is_refused(subject, texts):
    subject.reconstruct = lambda ids, keep, mask: torch.nn.functional.one_hot(ids, 64).float()

    with pytest.raises(RuntimeError, match="can see dropped tokens"):
        evaluate(subject, texts, corpus=texts, options=EvaluationOptions(**SMALL))


def test_an_untrained_policy_is_refused(subject, texts):
    subject.trained_steps = 0

    with pytest.raises(RuntimeError, match="has not been trained"):
        evaluate(subject, texts, corpus=texts, options=EvaluationOptions(**SMALL))


def test_pieces_lie_through_the_whole_document_without_overlap(subject, texts):
    long = texts[-1] * 4  # 512 tokens

    pieces = divide([long, "ab" * 8], encoder=subject.tokenizer, length=24, continuation=8, per_document=3)

    assert [len(piece.ids) for piece in pieces] == [24, 24, 24]  # the second document is too short
    assert pieces[0].ids == tuple(subject.tokenizer.encode(long)[:24])
    assert pieces[-1].continuation == tuple(subject.tokenizer.encode(long)[-8:])


def test_a_short_document_is_one_piece_in_the_same_proportion(subject, texts):
    (piece,) = divide(["ab" * 16], encoder=subject.tokenizer, length=96, continuation=32, per_document=4)

    assert (len(piece.ids), len(piece.continuation)) == (24, 8)


def test_texts_too_short_to_judge_are_refused(subject):
    with pytest.raises(ValueError, match="none of the 1 documents has 20 tokens"):
        divide(["ab"], encoder=subject.tokenizer, length=24, continuation=8, per_document=1)


def test_the_curves_are_drawn(record, tmp_path):
    path = plot(record, tmp_path / "curves" / "rate.png")

    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_record_without_rows_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        plot({"rows": []}, tmp_path / "rate.png")
