"""A tokenizer of `vocab.txt` and `bpe.codes` gives the ids of transformers' slow one."""

import json
import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lightning_unified.models.classifier.data.tokens import tweets
from lightning_unified.models.classifier.data.tokens.bpe_codes import load_bpe_codes, write_bpe_codes
from lightning_unified.models.classifier.data.tokens.encoder_tokenizer import load_encoder_tokenizer
from lightning_unified.models.classifier.data.tokens.text_encoder import TextEncoder

CORPUS = [
    "the battery is better than the better battery",
    "a bitter butter batter , bits and bats !",
    "no bet is a better bet :)",
] * 3
TEXTS = [
    "the better battery",
    "bat bats batters unbitterly embattled",
    "Ünknown 😀 ch@racters , here !",
    "two\nlines and  two  spaces ",
    "b be bet a I",
    "",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of merges, and of a vocabulary that lacks some of their pieces."""
    path = tmp_path_factory.mktemp("bertweet")
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=70, end_of_word_suffix="</w>", show_progress=False)
    )
    merges = json.loads(trained.to_str())["model"]["merges"]
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    tokens = [piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@" for piece in pieces]
    kept = [token for place, token in enumerate(tokens) if place % 5]
    (path / "vocab.txt").write_text("".join(f"{token} 9\n" for token in kept))
    (path / "bpe.codes").write_text("".join(f"{left} {right} 9\n" for left, right in merges))
    return path


def slow(folder, **options):
    from transformers import BertweetTokenizer

    return BertweetTokenizer(str(folder / "vocab.txt"), str(folder / "bpe.codes"), **options)


def ids_of(encoder, texts, *, max_length):
    return [encoding.ids for encoding in encoder.encode_fast(texts, max_length=max_length)]


def test_ids_are_those_of_transformers_also_of_pieces_that_the_vocabulary_lacks(folder):
    own = TextEncoder(load_encoder_tokenizer(str(folder)))
    again = TextEncoder.from_str(own.to_str())
    wanted = [slow(folder).encode(text) for text in TEXTS]

    assert ids_of(own, TEXTS, max_length=64) == ids_of(again, TEXTS, max_length=64) == wanted
    assert any(3 in ids for ids in wanted[:2])  # pieces of known characters, unknown together
    assert len(own) == len(slow(folder))
    assert (own.pad_id, own.id_of("mask_token")) == (1, slow(folder).mask_token_id)
    assert [one.ids for one in own.encode(TEXTS, max_length=4)] == [
        slow(folder).encode(text, truncation=True, max_length=4) for text in TEXTS
    ]
    assert [one.overflowing for one in own.encode(["bet", TEXTS[0]], max_length=4)] == [False, True]


def test_what_is_exported_is_read_again(folder, tmp_path):
    write_bpe_codes(load_bpe_codes(folder), tmp_path, max_length=64)

    assert [slow(tmp_path).encode(text) for text in TEXTS] == [slow(folder).encode(text) for text in TEXTS]


def test_tweets_are_normalised_if_the_tokenizer_asks_for_it(folder, tmp_path, monkeypatch):
    for name in ("vocab.txt", "bpe.codes"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"normalization": true}')
    tweet = "@me can't: https://a.b/c 😀 the better…battery"
    own = TextEncoder.from_str(TextEncoder(load_encoder_tokenizer(str(tmp_path))).to_str())

    monkeypatch.setitem(
        sys.modules, "emoji", SimpleNamespace(demojize=lambda text: text.replace("😀", ":grinning_face:"))
    )
    tweets._normalizer.cache_clear()
    assert own.prepared(tweet) == "@USER can't : HTTPURL :grinning_face: the better ... battery"
    assert ids_of(own, [tweet], max_length=64) == [slow(tmp_path, normalization=True).encode(tweet)]

    monkeypatch.setitem(sys.modules, "emoji", None)
    tweets._normalizer.cache_clear()
    with pytest.raises(RuntimeError, match="run: pip install emoji"):
        ids_of(own, [tweet], max_length=64)
    tweets._normalizer.cache_clear()


def test_files_of_another_form_are_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("one\n")
    (tmp_path / "bpe.codes").write_text("a b\n")
    with pytest.raises(ValueError, match=r"vocab.txt:1: 'one' is not a token, a space and a count"):
        load_bpe_codes(tmp_path)
    (tmp_path / "vocab.txt").write_text("one 1\n")
    with pytest.raises(ValueError, match=r"bpe.codes:1: 'a b' is not two pieces and a count"):
        load_bpe_codes(tmp_path)
