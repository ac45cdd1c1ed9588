"""Every text has tokens, and its tokens give it back exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.data.documents.record import SPECIAL_TOKENS
from lightning_unified.data.tokenizer import (
    SMALLEST_VOCABULARY,
    encode_records,
    encode_texts,
    load_tokenizer,
    train_tokenizer,
)

TOKENIZER = train_tokenizer(["The pump stops. The pump starts. P0301 and P0302 again."] * 3, vocab_size=320)


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_exactly(text):
    (ids,) = encode_texts(TOKENIZER, [text])

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.token_to_id("<unk>") not in ids


def test_bytes_never_seen_in_training_come_back():
    text = "Ölpumpe\tläuft \U0001f69c\r\n  NUL\x00 é"
    (ids,) = encode_texts(TOKENIZER, [text])

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_first_ids():
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(9))


def test_a_tag_in_a_plain_text_is_not_the_special_token():
    (ids,) = encode_texts(TOKENIZER, ["a <s> b"])

    assert min(ids) >= len(SPECIAL_TOKENS)
    assert TOKENIZER.encode("a <s> b", add_special_tokens=False).ids.count(1) == 1


def test_a_tag_in_a_record_is_the_special_token():
    (encoding,) = encode_records(TOKENIZER, ["<s><equipment> pump</s>"])

    assert encoding.ids[:2] == [1, 8]
    assert encoding.ids[-1] == 2


def test_case_and_blanks_are_kept():
    upper, lower = encode_texts(TOKENIZER, ["P0301  x", "p0301 x"])

    assert upper != lower


def test_the_vocabulary_is_never_larger_than_asked():
    assert (
        train_tokenizer(["abc abc abc abd"], vocab_size=SMALLEST_VOCABULARY + 1).get_vocab_size()
        == SMALLEST_VOCABULARY + 1
    )
    assert train_tokenizer(["x"], vocab_size=5000).get_vocab_size() == SMALLEST_VOCABULARY


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size=264 does not hold .* give at least 265"):
        train_tokenizer(["abc"], vocab_size=264)


def test_training_twice_gives_the_same_tokenizer():
    texts = ["one pump, two pumps", "three valves"]

    assert train_tokenizer(texts, vocab_size=280).to_str() == train_tokenizer(texts, vocab_size=280).to_str()


def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.to_str(), encoding="utf-8")

    assert load_tokenizer(tmp_path / "tokenizer.json").to_str() == TOKENIZER.to_str()


def test_files_that_are_no_tokenizer_of_ours_are_refused(tmp_path):
    other = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"tokenizer_file=.*does not exist"):
        load_tokenizer(other)
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(other)
    other.write_text(TOKENIZER.to_str().replace("<pad>", "<PAD>"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"does not have <pad> .* as ids 0 to 8"):
        load_tokenizer(other)
