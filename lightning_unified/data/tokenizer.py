"""Lossless byte-level BPE: train a tokenizer, load one, and encode texts.

The alphabet is all 256 bytes, so `<unk>` never occurs. Texts are not lowered, stripped or normalised. The nine special tokens
have the ids 0 to 8, as in `documents.record`; bytes follow. Merges are learnt from the training split only.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_unified.data.documents.record import SPECIAL_TOKENS

__all__ = [
    "SMALLEST_VOCABULARY",
    "encode_records",
    "encode_texts",
    "load_or_train_tokenizer",
    "load_tokenizer",
    "read_tokenizer",
    "serial",
    "train_tokenizer",
]

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: list[str], *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer with at most `vocab_size` tokens; short texts give fewer merges.

    Raises:
        ValueError: If `vocab_size` does not hold the special tokens and the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} does not hold the {len(SPECIAL_TOKENS)} special tokens and the 256 bytes; "
            f"give at least {SMALLEST_VOCABULARY}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    with serial():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_or_train_tokenizer(file: str | None, texts: list[str], *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in `file`, or train one on `texts` if there is no file.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: As `load_tokenizer` and `train_tokenizer`.
    """
    return load_tokenizer(Path(file)) if file else train_tokenizer(texts, vocab_size=vocab_size)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in a `tokenizer.json`, to continue with its vocabulary.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If the file holds no tokenizer, or its special tokens have other ids.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.tokenizer_file={path} does not exist; give the tokenizer.json of a run, or null."
        )
    tokenizer = read_tokenizer(path)
    if any(tokenizer.token_to_id(token) != place for place, token in enumerate(SPECIAL_TOKENS)):
        raise ValueError(f"{path} does not have {' '.join(SPECIAL_TOKENS)} as ids 0 to {len(SPECIAL_TOKENS) - 1}.")
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer in a file; raise a ValueError if the file holds none."""
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Return the ids of plain texts; `<s>` in a text is three characters, not the special token."""
    tokenizer.encode_special_tokens = True
    try:
        with serial():
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = False


def encode_records(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """Return ids and character offsets of texts from `record.render`.

    The tags of these texts are special tokens.
    """
    with serial():
        return tokenizer.encode_batch(texts, add_special_tokens=False)


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Disable the library's threads: once used, every forked worker warns of deadlocks."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
