"""TextData: from arguments to batches, the same every time.

Invalid arguments are refused before any file is read.
"""

import json
import math

import pytest
import torch

from lightning_unified.data import TextData
from lightning_unified.data.__main__ import main
from lightning_unified.data.documents import record as layout

KEYS = {"input_ids", "labels", "error_code_ids", "diagnosis_labels"}


def text_data(**changes):
    settings = {"source": "builtin", "batch_size": 2, "sequence_length": 192, "vocab_size": 300}
    return TextData(**(settings | changes))


def batches(data):
    return [*data.train_dataloader(), *data.val_dataloader()]


def test_every_batch_has_the_same_keys_and_ids_below_the_vocabulary():
    data = text_data()

    for batch in batches(data):
        assert set(batch) == KEYS
        assert len({values.shape for values in batch.values()}) == 1
        assert batch["input_ids"].max() < data.vocab_size <= 300
        assert batch["error_code_ids"].max() < 10_000


def test_two_modules_with_the_same_arguments_agree_in_every_token():
    for first, second in zip(batches(text_data()), batches(text_data()), strict=True):
        assert all(torch.equal(first[key], second[key]) for key in KEYS)


def test_setup_twice_does_the_work_once():
    data = text_data()
    data.setup("fit")
    tokenizer = data.tokenizer
    data.setup("validate")

    assert data.tokenizer is tokenizer


def test_every_training_token_is_scored_once_an_epoch():
    data = text_data(drop_last=False)
    scored = sum(int((batch["labels"] != -100).sum()) for batch in data.train_dataloader())
    targets = sum(
        int((ids != layout.BOS_ID).sum()) for ids in (sequence.ids for sequence in data._prepared.train_sequences)
    )

    assert scored == targets == data.describe()["train"]["scored_tokens"]


def test_answer_mode_uses_records_only_and_says_what_it_left_out():
    data = text_data(loss_on="answer")
    cause = data.tokenizer.token_to_id("<cause>")
    for batch in batches(data):
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if (labels != -100).any():
                assert int((labels != -100).nonzero()[0]) == int((ids == cause).nonzero()[0]) + 1

    assert data.describe()["texts_left_out"] == 12
    assert text_data().describe()["texts_left_out"] == 0


def test_answer_mode_without_records_is_refused():
    with pytest.raises(ValueError, match=r"loss_on=answer .*source=pydoc has only plain"):
        text_data(source="pydoc", loss_on="answer").setup()


def test_baselines_are_finite_and_below_the_vocabulary():
    data = text_data(source="pydoc", max_groups=12, vocab_size=400)
    baselines = data.baselines()

    assert set(baselines) == {"bigram", "trigram"}
    assert 1 < baselines["trigram"] < baselines["bigram"] < data.vocab_size


def test_baselines_are_judged_on_the_models_own_targets():
    data = text_data()
    judged = sum(int((labels != -100).sum()) for _, labels in data._prepared.validation.scored_sequences())
    batched = sum(int((batch["labels"] != -100).sum()) for batch in data.val_dataloader())

    assert judged == batched == data.describe()["validation"]["scored_tokens"]


def test_a_given_tokenizer_is_used_instead_of_learning_one(tmp_path):
    first = text_data(vocab_size=290)
    (tmp_path / "tokenizer.json").write_text(first.tokenizer.to_str(), encoding="utf-8")
    second = text_data(tokenizer_file=str(tmp_path / "tokenizer.json"))

    assert second.vocab_size == first.vocab_size == 290


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    batches(text_data())

    assert torch.equal(before, torch.get_rng_state())


def test_users_files_are_a_source(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"a text about {name}\n" * 20, encoding="utf-8")
    data = text_data(source="files", path=str(tmp_path), val_fraction=0.5, drop_last=False)

    assert len(list(data.train_dataloader())) == 1


def test_a_record_longer_than_a_row_is_refused_and_the_needed_length_is_named():
    with pytest.raises(
        ValueError, match=r"record\(s\) have more than data.sequence_length=64 tokens.*longest \d+; set"
    ):
        text_data(sequence_length=64).setup()


def test_a_split_smaller_than_a_batch_is_refused_unless_the_last_batch_is_kept():
    assert len(text_data(batch_size=64, drop_last=False).train_dataloader()) == 1

    with pytest.raises(ValueError, match=r"rows, fewer than data.batch_size=64, and data.drop_last"):
        text_data(batch_size=64).train_dataloader()


WRONG = [
    ({"batch_size": -4}, r"data\.batch_size=-4; it must be a whole number of at least 1"),
    ({"batch_size": 2.5}, r"data\.batch_size=2\.5"),
    ({"batch_size": True}, r"data\.batch_size=True"),
    ({"sequence_length": 1}, r"data\.sequence_length=1; .* at least 8"),
    ({"vocab_size": 100}, r"data\.vocab_size=100; .* at least 265"),
    ({"num_workers": -1}, r"data\.num_workers=-1"),
    ({"prefetch_factor": 0}, r"data\.prefetch_factor=0; .* at least 1 or null"),
    ({"max_groups": 1}, r"data\.max_groups=1; .* at least 2 or null"),
    ({"val_fraction": 0.9}, r"data\.val_fraction=0\.9; it must be above 0 and at most 0\.5"),
    ({"val_fraction": 0}, r"data\.val_fraction=0"),
    ({"source": "pydocs"}, r"data\.source='pydocs'; .*did you mean pydoc"),
    ({"loss_on": "answers"}, r"data\.loss_on='answers'; .*did you mean answer"),
    ({"start_method": "thread"}, r"data\.start_method='thread'"),
    ({"pin_memory": "yes"}, r"data\.pin_memory='yes'; it must be true or false"),
    ({"source": "files"}, r"data\.source=files needs data\.path"),
    ({"path": "x.txt"}, r"data\.path=x\.txt is given, but data\.source=builtin"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_an_argument_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        text_data(**change)


def test_describe_prints_json_and_mistakes_go_to_standard_error(capsys):
    assert main(["describe", "--source", "builtin", "--batch-size", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["records"] > 0
    assert main(["describe", "--source", "files", "--path", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_bits_per_byte_are_the_perplexity_over_the_bytes(capsys):
    assert main(["baselines", "--source", "builtin", "--batch-size", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = TextData(source="builtin", batch_size=2)
    expected = report["scored_tokens"] * math.log2(data.baselines()["bigram"]) / data.describe()["validation"]["bytes"]

    assert report["bigram_bits_per_byte"] == pytest.approx(expected, abs=1e-4)
