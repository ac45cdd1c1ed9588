"""Tokenizer of a classifier: stored in checkpoints as plain text, encodes texts and batches.

Training, evaluation and prediction use the same encoding. Texts are not changed before. Lowering, accents and white space are the
tokenizer's own matter. Lowering a text or removing names, links, digits or signs beforehand would hide information that the encoder
knows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from lightning_unified.data.tokenizer import serial
from lightning_unified.models.classifier.data.tokens.bpe_codes import BEYOND, TWEETS
from lightning_unified.models.classifier.data.tokens.tweets import normalize_tweet

__all__ = ["TextEncoder"]

_SPECIAL = ("pad_token", "cls_token", "sep_token", "mask_token", "unk_token", "bos_token", "eos_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A text's tokens, with the attributes of `tokenizers.Encoding` that the classifier reads."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]
    special_tokens_mask: list[int]
    overflowing: bool


class TextEncoder:
    """A tokenizer with its special tokens; it adds those of the model's pretraining.

    Args:
        tokenizer: A fast tokenizer of transformers, or a `tokenizers.Tokenizer`.
        special: Names of special tokens under transformers' keys; None takes the tokenizer's own, or usual ones.
    """

    def __init__(self, tokenizer: Any, *, special: Mapping[str, str] | None = None) -> None:
        backend = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
        self._backend = Tokenizer.from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._beyond = self._backend.token_to_id(BEYOND)
        self.special = dict(_special_of(tokenizer) if special is None else special)

    @classmethod
    def from_str(cls, text: str) -> "TextEncoder":
        """Return the tokenizer from the result of `to_str`."""
        saved = json.loads(text)
        return cls(Tokenizer.from_str(saved["tokenizer"]), special=saved["special"])

    def to_str(self) -> str:
        """Return tokenizer and special tokens as JSON."""
        return json.dumps({"tokenizer": self._backend.to_str(), "special": self.special})

    def __len__(self) -> int:
        return self._backend.get_vocab_size() if self._beyond is None else self._beyond

    def prepared(self, text: str) -> str:
        """Return the text to encode: a normalised tweet for BERTweet's tokenizer, else the text."""
        return normalize_tweet(text) if self._backend.token_to_id(TWEETS) is not None else text

    def __eq__(self, other: object) -> bool:
        """Return whether both tokenizers map the same tokens to the same ids.

        Other parts of a tokenizer's file depend on the library.
        """
        if not isinstance(other, TextEncoder):
            return False
        return self.special == other.special and self._backend.get_vocab() == other._backend.get_vocab()

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.special.items())))

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer itself."""
        return self._backend

    @property
    def pad_id(self) -> int:
        """Id of the padding token; 0 for a tokenizer without one, where only the mask matters."""
        return self.id_of("pad_token") or 0

    def id_of(self, kind: str) -> int | None:
        """Return the id of a special token such as "mask_token"; None if there is none."""
        name = self.special.get(kind)
        return None if name is None else self._backend.token_to_id(name)

    def encode(self, texts: Sequence[str], *, max_length: int) -> Sequence[Encoding | Encoded]:
        """Return the encodings of texts, with special tokens, truncated to `max_length` tokens.

        `[SEP]` in a text is five characters, not the special token.
        """
        return self._within(self._truncating(max_length).encode_batch([self.prepared(text) for text in texts]))

    def encode_fast(self, texts: Sequence[str], *, max_length: int) -> Sequence[Encoding | Encoded]:
        """Return the same encodings without offsets, which is faster."""
        with serial():
            return self._within(self._truncating(max_length).encode_batch_fast([self.prepared(text) for text in texts]))

    def _within(self, encodings: Sequence[Encoding]) -> Sequence[Encoding | Encoded]:
        """Return the encodings with the unknown token's id in place of ids beyond the vocabulary.

        `bpe_codes` explains where such ids come from.
        """
        limit, unknown = self._beyond, self.id_of("unk_token")
        if limit is None or unknown is None:
            return encodings
        return [
            Encoded(
                ids=[unknown if number >= limit else number for number in one.ids],
                offsets=one.offsets,
                word_ids=one.word_ids,
                special_tokens_mask=one.special_tokens_mask,
                overflowing=bool(one.overflowing),
            )
            for one in encodings
        ]

    def _truncating(self, length: int) -> Tokenizer:
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        backend.enable_truncation(length)
        return backend

    def batch(self, rows: Sequence[Sequence[int]], *, length: int) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` (B, `length`) of rows of token ids.

        Pads stand at the end.
        """
        ids = torch.full((len(rows), length), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[index, : len(row)] = True
        return {"input_ids": ids, "attention_mask": mask}


def _special_of(tokenizer: Any) -> dict[str, str]:
    if not isinstance(tokenizer, Tokenizer):
        return {kind: str(name) for kind in _SPECIAL if (name := getattr(tokenizer, kind, None)) is not None}
    usual = {
        "pad_token": ("[PAD]", "<pad>", "<|pad|>"),
        "cls_token": ("[CLS]", "<s>"),
        "sep_token": ("[SEP]", "</s>"),
        "mask_token": ("[MASK]", "<mask>"),
        "unk_token": ("[UNK]", "<unk>"),
    }
    found = {
        kind: next((n for n in names if tokenizer.token_to_id(n) is not None), None) for kind, names in usual.items()
    }
    return {kind: name for kind, name in found.items() if name is not None}
