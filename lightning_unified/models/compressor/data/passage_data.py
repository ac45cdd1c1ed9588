"""`PassageData`: passages of plain text from a named source, as batches that resume."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.documents.document import Document
from lightning_unified.data.loader import LoaderOptions
from lightning_unified.data.resumable import ResumableData
from lightning_unified.data.sources import corpora
from lightning_unified.data.splitting import Split, split
from lightning_unified.data.tokenizer import SMALLEST_VOCABULARY, encode_texts, load_or_train_tokenizer
from lightning_unified.models.compressor.data.passages import Passages

__all__ = ["PassageData"]

_SHORTEST = 8  # tokens; a shorter rest of a document is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    parts: Split
    tokenizer: Tokenizer
    train_documents: list[np.ndarray]
    train: Passages
    validation: Passages


class PassageData(ResumableData[Passages]):
    """Plain texts, split by document, in batches of passages and continuations; see `Passages`.

    All results depend only on the arguments and the source; the global random state is never used. Diagnostic records are used as
    rendered texts.

    Args:
        source: `pydoc` (Python's topics), `botocore` (AWS documentation), `dtc`, `builtin` (for tests), or `files`.
        path: For `files`: a `.jsonl` or `.txt` file, or a folder of them.
        batch_size: Rows of a batch over all ranks: the effective batch.
        val_batch_size: Rows of a validation batch; None for `batch_size`.
        text_length: Tokens of a passage.
        continuation_length: Tokens of its continuation; 0 for none.
        vocab_size: Largest vocabulary; a small corpus gives fewer tokens.
        tokenizer_file: A `tokenizer.json` to use instead of learning one.
        pretrained: Pretrained model that provides the tokenizer: `smollm2-135m`, a folder, an installed package or a hub id; None
            trains one.
        val_fraction: Share of the bytes for validation, met roughly since groups stay whole.
        seed: Draws split and order.
        max_groups: Number of groups (topics, services, files) to use; None for all.
        drop_last: Leave out rows that do not fill a training batch, other rows each epoch.
        num_workers: Processes that make batches; 0 for none. The next three arguments have no effect then.
        persistent_workers: Keep the workers from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for PyTorch's 2.
        start_method: `fork`, `spawn` or `forkserver`; None for the system's own.
        pin_memory: Copy batches into page-locked memory.

    Raises:
        ValueError: If an argument makes no sense, or the documents do not fit it.
        FileNotFoundError: If the source is not there.
    """

    def __init__(
        self,
        *,
        source: str = "pydoc",
        path: str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        text_length: int = 128,
        continuation_length: int = 0,
        vocab_size: int = 2048,
        tokenizer_file: str | None = None,
        pretrained: str | None = None,
        val_fraction: float = 0.1,
        seed: int = 0,
        max_groups: int | None = None,
        drop_last: bool = True,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        start_method: str | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(LoaderOptions.of(locals()))
        settings.check_counts(smallest=8, text_length=text_length)
        settings.check_counts(smallest=0, continuation_length=continuation_length)
        settings.check_counts(smallest=SMALLEST_VOCABULARY, vocab_size=vocab_size)
        settings.check_counts(smallest=2, optional=True, max_groups=max_groups)
        settings.check_source(source, path, sources=corpora.SOURCES)
        settings.check_fractions(val_fraction=val_fraction)
        if tokenizer_file and pretrained:
            raise ValueError(
                f"data.tokenizer_file={tokenizer_file} and data.pretrained={pretrained} both name a tokenizer; give one."
            )
        self.source, self.text_length, self.continuation_length = source, text_length, continuation_length

    @property
    def train_documents(self) -> list[np.ndarray]:
        """The token ids of each training document, for frequencies and n-grams."""
        return self._prepared.train_documents

    @property
    def held_out(self) -> list[Document]:
        """The validation documents, which share no group and no line with training."""
        return self._prepared.parts.validation

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        sides = {("input_ids", "mask"): self.text_length}
        if self.continuation_length:
            sides["continuation", "continuation_mask"] = self.continuation_length
        batch = {}
        for (ids, mask), length in sides.items():
            batch[ids] = torch.zeros(rows, length, dtype=torch.int64)
            batch[mask] = torch.ones(rows, length, dtype=torch.bool)
        return batch

    @override
    def describe_line(self) -> str:
        prepared = self._prepared
        passages = {side: f"{len(getattr(prepared, side)):,} passages" for side in ("train", "validation")}
        return f"{prepared.parts.describe_line(**passages)}; vocabulary of {self.vocab_size:,} tokens"

    def describe(self) -> dict[str, Any]:
        """Return counts of documents, passages and left-out tokens, and bytes of UTF-8."""
        prepared, parts = self._prepared, self._prepared.parts
        return {
            "source": self.source,
            "vocabulary": self.vocab_size,
            "text_length": self.text_length,
            "continuation_length": self.continuation_length,
            "train": _side(parts.train, prepared.train),
            "validation": _side(parts.validation, prepared.validation),
            "dropped_from_validation": {"lines": parts.dropped_lines, "of_lines": parts.validation_lines},
        }

    @cached_property
    def _prepared(self) -> _Prepared:
        asked, seed = self.hparams, self.options.seed
        documents = corpora.load(self.source, path=asked["path"], max_groups=asked["max_groups"], seed=seed)
        parts = split(documents, fraction=asked["val_fraction"], seed=seed)
        tokenizer = self._tokenizer([document.content for document in parts.train])
        train = _encoded(tokenizer, parts.train)
        sizes = {"length": self.text_length, "continuation_length": self.continuation_length, "shortest": _SHORTEST}
        sides = [Passages(ids, **sizes) for ids in (train, _encoded(tokenizer, parts.validation))]
        for name, side in zip(("training", "validation"), sides, strict=True):
            if not len(side):
                raise ValueError(
                    f"no document of the {name} side has {_SHORTEST} tokens, so there is no text to compress; give longer ones."
                )
        return _Prepared(parts=parts, tokenizer=tokenizer, train_documents=train, train=sides[0], validation=sides[1])

    def _tokenizer(self, texts: list[str]) -> Tokenizer:
        if self.hparams["pretrained"]:
            from lightning_unified.models.compressor.network.pretrained import load_tokenizer

            return load_tokenizer(self.hparams["pretrained"])
        return load_or_train_tokenizer(self.hparams["tokenizer_file"], texts, vocab_size=self.hparams["vocab_size"])


def _encoded(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    texts = encode_texts(tokenizer, [document.content for document in documents])
    return [np.asarray(ids, dtype=np.int32) for ids in texts]


def _side(documents: list[Document], passages: Passages) -> dict[str, Any]:
    return {
        "documents": len(documents),
        "groups": len({document.group for document in documents}),
        "bytes": sum(len(document.content.encode()) for document in documents),
        "passages": len(passages),
        "tokens": passages.tokens,
        "tokens_left_out": passages.left_out,
    }
