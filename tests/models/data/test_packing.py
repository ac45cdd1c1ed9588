"""Rows: each token scored once, labels unshifted.

Codes and questions are in their places; the rest is padding.
"""

import itertools

import numpy as np
import pytest
import torch

from lightning_unified.data.documents import error_codes as codes
from lightning_unified.data.documents import record as layout
from lightning_unified.data.documents.document import Document
from lightning_unified.data.packing import Rows, Sequence, choose_buckets, sequences, windows
from lightning_unified.data.tokenizer import train_tokenizer

RECORD = layout.Record(
    equipment="Wheel loader",
    symptom="will not start, stored P0301",
    error_codes=("P0087", "SPN 157"),
    probable_cause="Fuel filter is clogged",
    solution="Change the filter, clear P0087",
)


def stream(length):
    return Sequence(
        ids=np.arange(10, 10 + length, dtype=np.int32),
        scored=np.ones(length, dtype=bool),
        codes=np.zeros(length, dtype=np.int32),
        diagnosis=np.full(length, -100, dtype=np.int8),
    )


def scored(rows):
    return [int(token) for row in rows for token in row.ids[row.scored]]


@pytest.mark.parametrize(("total", "stride"), [*itertools.product([2, 7, 8, 9, 15, 16, 50], [4, 7])])
def test_every_token_but_the_first_is_scored_exactly_once(total, stride):
    rows = list(windows(stream(total), length=8, stride=stride))

    assert scored(rows) == list(range(11, 10 + total))
    assert all(len(row.ids) <= 8 for row in rows)


def test_validation_windows_give_each_token_half_a_row_of_context():
    rows = list(windows(stream(50), length=8, stride=4))

    assert all(np.flatnonzero(row.scored).min() >= 4 for row in rows[1:])


def test_training_windows_overlap_by_one_token():
    rows = list(windows(stream(50), length=8, stride=7))

    assert all(before.ids[-1] == after.ids[0] for before, after in itertools.pairwise(rows))


def test_texts_become_one_stream_whose_starts_are_not_scored():
    texts = ["one two three", "four <s> five"]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    (found,) = sequences(tokenizer, [Document(group=text, text=text) for text in texts], loss_on="all")

    assert (found.ids == layout.BOS_ID).sum() == 2
    assert (found.ids == layout.EOS_ID).sum() == 2
    assert not found.scored[found.ids == layout.BOS_ID].any()
    assert found.scored[found.ids != layout.BOS_ID].all()
    assert tokenizer.decode([i for i in found.ids if i not in {1, 2}], skip_special_tokens=False) == "".join(texts)


def record_sequence(loss_on="all", record=RECORD):
    tokenizer = train_tokenizer([layout.render(record)], vocab_size=300)
    (found,) = sequences(tokenizer, [Document(group="a", record=record)], loss_on=loss_on)
    return tokenizer, found


def test_a_record_is_its_layout_token_for_token():
    tokenizer, found = record_sequence()

    assert tokenizer.decode(found.ids, skip_special_tokens=False) == layout.render(RECORD)
    assert (found.ids[0], found.ids[-1]) == (layout.BOS_ID, layout.EOS_ID)
    assert found.is_record


def test_the_answer_is_scored_and_nothing_before_it():
    tokenizer, found = record_sequence(loss_on="answer")
    expected = layout.render(RECORD)[layout.answer_offset(layout.render(RECORD)) :]

    assert tokenizer.decode(found.ids[found.scored], skip_special_tokens=False) == expected


def test_each_code_stands_at_its_last_token_wherever_it_occurs():
    tokenizer, found = record_sequence()
    text = layout.render(RECORD)
    places = np.flatnonzero(found.codes)
    before = [tokenizer.decode(found.ids[: place + 1], skip_special_tokens=False) for place in places]

    assert [text[:end] for _, end, _ in codes.find(text)] == before
    assert [code for _, _, code in codes.find(text)] == found.codes[places].tolist()
    assert len(places) == 4


def test_the_diagnosis_is_asked_once_at_the_error_tag():
    tokenizer, found = record_sequence()
    (place,) = np.flatnonzero(found.diagnosis != -100)

    assert tokenizer.id_to_token(int(found.ids[place])) == "<error>"
    assert found.diagnosis[place] == codes.subsystem("P0087")


def test_a_record_without_codes_asks_no_diagnosis():
    _, found = record_sequence(record=layout.Record(equipment="a", symptom="b", probable_cause="c"))

    assert (found.diagnosis == -100).all()
    assert not found.codes.any()


def test_batches_hold_the_rows_and_nothing_in_the_padding():
    batch = Rows([stream(5), stream(11)], buckets=[8, 16]).__getitems__([0, 1])

    assert set(batch) == {"input_ids", "labels", "error_code_ids", "diagnosis_labels"}
    assert all(values.dtype == torch.int64 and values.shape == (2, 16) for values in batch.values())
    assert batch["input_ids"][0].tolist() == [10, 11, 12, 13, 14] + [layout.PAD_ID] * 11
    assert batch["labels"][0].tolist() == [-100, 11, 12, 13, 14] + [-100] * 11
    assert (batch["diagnosis_labels"] == -100).all()
    assert not batch["error_code_ids"].any()


def test_labels_are_counted_alike_shifted_and_unshifted():
    rows = Rows([stream(5), stream(11)], buckets=[16])
    labels = rows.__getitems__([0, 1])["labels"]

    assert (labels != -100).sum() == (labels[:, 1:] != -100).sum() == rows.scored_tokens == 14


def test_a_batch_is_padded_to_the_bucket_of_its_longest_row():
    rows = Rows([stream(5), stream(11)], buckets=[8, 16])

    assert rows.__getitems__([0])["labels"].shape == (1, 8)
    assert rows[1]["labels"].shape == (16,)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_buckets_waste_the_least_padding_that_so_many_can(most):
    lengths = np.random.default_rng(0).integers(1, 120, size=60)

    def padded(buckets):
        return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)

    sizes = sorted({min(-(-length // 16) * 16, 112 + 8) for length in lengths})
    chosen = choose_buckets(lengths, longest=120, most=most)
    best = min(padded([*some, sizes[-1]]) for some in itertools.combinations(sizes[:-1], most - 1))

    assert padded(chosen) == best
    assert len(chosen) <= most
