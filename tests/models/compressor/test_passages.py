"""Passages: documents divided without gaps, each with its continuation.

No passage spans two documents, and no held-out text is seen.
"""

import numpy as np
import pytest
import torch

from lightning_unified.models.compressor import PassageData
from lightning_unified.models.compressor.data.passages import Passages

DOCUMENTS = [np.arange(10, 30), np.arange(40, 43), np.arange(50, 58)]


def passage_data(**changes):
    return PassageData(**({"source": "builtin", "batch_size": 2, "text_length": 32, "vocab_size": 300} | changes))


def contents(batch, name="input_ids", mask="mask"):
    return [ids[real].tolist() for ids, real in zip(batch[name], batch[mask], strict=True)]


def test_passages_cover_each_document_in_order_and_none_spans_two():
    passages = Passages(DOCUMENTS, length=8)
    found = contents(passages.__getitems__(list(range(len(passages)))))

    assert found == [
        list(range(10, 18)),
        list(range(18, 26)),
        list(range(26, 30)),
        [40, 41, 42],
        list(range(50, 58)),
    ]
    assert (passages.tokens, passages.left_out) == (31, 0)


def test_a_continuation_is_what_follows_in_the_same_document():
    passages = Passages(DOCUMENTS, length=8, continuation_length=5)
    batch = passages.__getitems__(list(range(len(passages))))

    assert contents(batch, "continuation", "continuation_mask") == [
        [18, 19, 20, 21, 22],
        [26, 27, 28, 29],
        [],
        [],
        [],
    ]
    assert batch["continuation"].shape == batch["continuation_mask"].shape == (5, 5)


def test_a_rest_that_is_too_short_is_left_out_and_counted():
    passages = Passages(DOCUMENTS, length=8, shortest=4)

    assert len(passages) == 4
    assert passages.left_out == 3


def test_a_row_of_padding_has_no_token():
    batch = Passages(DOCUMENTS, length=8, continuation_length=2).__getitems__([-1, 0])

    assert not batch["mask"][0].any()
    assert not batch["continuation_mask"][0].any()
    assert batch["mask"][1].all()


def test_other_documents_or_lengths_are_another_order():
    checksums = {
        Passages(documents, length=length).checksum for documents in (DOCUMENTS, DOCUMENTS[:2]) for length in (4, 8)
    }

    assert len(checksums) == 4


def test_batches_are_a_function_of_the_arguments_and_have_the_shapes_of_the_example():
    one, two = (list(passage_data(continuation_length=8).train_dataloader()) for _ in range(2))
    example = passage_data(continuation_length=8).example_batch()

    assert len(one) > 1
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    assert {name: (values.shape, values.dtype) for name, values in one[0].items()} == {
        name: (values.shape, values.dtype) for name, values in example.items()
    }
    assert set(passage_data().example_batch()) == {"input_ids", "mask"}


def test_no_held_out_line_is_in_training_and_the_tokenizer_gives_texts_back():
    data = passage_data()
    decode = data.tokenizer.decode
    trained = "\n".join(decode(ids.tolist()) for ids in data.train_documents)
    held_out = [line for document in data.held_out for line in document.content.splitlines() if line.strip()]

    assert held_out
    assert [line for line in held_out if line in trained.splitlines()] == []
    row = contents(next(iter(data.val_dataloader())))[0]
    assert any(document.content.startswith(decode(row)) for document in data.held_out)


def test_the_description_counts_both_sides():
    described = passage_data().describe()

    assert described["train"]["passages"] == len(passage_data().rows[0])
    assert described["train"]["tokens"] > described["validation"]["tokens"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_length": 4}, "data.text_length=4; it must be a whole number of at least 8"),
        ({"continuation_length": -1}, "data.continuation_length=-1"),
        ({"source": "pydocs"}, "did you mean pydoc"),
        ({"tokenizer_file": "a.json", "pretrained": "smollm2-135m"}, "both name a tokenizer; give one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        passage_data(**change)


def test_documents_too_short_for_a_text_are_an_error(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(chr(97 + index))
    with pytest.raises(ValueError, match="has 8 tokens, so there is no text to compress"):
        passage_data(source="files", path=str(tmp_path)).setup()
