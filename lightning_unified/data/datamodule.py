"""`TextData`: plain texts and diagnostic records from a named source.

Its loaders can resume in the middle of an epoch.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.loader import LoaderOptions
from lightning_unified.data.ngram import NGram, perplexity
from lightning_unified.data.packing import Rows, Sequence, choose_buckets, sequences, windows
from lightning_unified.data.resumable import ResumableData
from lightning_unified.data.sources import corpora
from lightning_unified.data.splitting import Split, split
from lightning_unified.data.tokenizer import SMALLEST_VOCABULARY, load_or_train_tokenizer

__all__ = ["TextData"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """Results of `setup`: the split, the tokenizer, and the rows of both sides."""

    parts: Split
    texts_left_out: int
    tokenizer: Tokenizer
    train_sequences: list[Sequence]
    train: Rows
    validation: Rows


class TextData(ResumableData[Rows]):
    """Text and records, split by group.

    A batch has `input_ids`, `labels`, `error_code_ids` and `diagnosis_labels`. Split, tokenizer, rows and order depend only on
    the arguments and the source, so they are equal in every process. The global random state is never used. `Rows` describes
    the batches, `ResumableLoader` the loader.

    Args:
        source: `pydoc` (Python's topics), `dtc` (fault codes of elm327obd), `botocore` (AWS documentation), `builtin` (a
            handful of texts and records for tests), or `files`.
        path: For `files`: a `.jsonl` or `.txt` file, or a folder of them.
        batch_size: Rows of a batch over all ranks: the effective batch.
        val_batch_size: Rows of a validation batch; None for `batch_size`.
        sequence_length: Tokens of a row of plain text, and the most a record may have.
        vocab_size: Largest vocabulary; a small corpus gives fewer tokens.
        tokenizer_file: A `tokenizer.json` to use instead of learning one, to continue a trained model on other data.
        loss_on: `all` tokens, or the `answer` (cause and solution) of records only; plain texts are then left out.
        val_fraction: Share of the bytes for validation, met roughly since groups stay whole.
        seed: Draws split and order.
        max_groups: Number of groups (topics, services, files, families of codes) to use; None for all.
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
        sequence_length: int = 256,
        vocab_size: int = 2048,
        tokenizer_file: str | None = None,
        loss_on: Literal["all", "answer"] = "all",
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
        settings.check_counts(smallest=8, sequence_length=sequence_length)
        settings.check_counts(smallest=SMALLEST_VOCABULARY, vocab_size=vocab_size)
        settings.check_counts(smallest=2, optional=True, max_groups=max_groups)
        settings.check_source(source, path, sources=corpora.SOURCES)
        settings.check_one_of("loss_on", loss_on, ("all", "answer"))
        settings.check_fractions(val_fraction=val_fraction)
        self.source, self.sequence_length = source, sequence_length
        self.loss_on: Literal["all", "answer"] = loss_on

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        names = ("input_ids", "labels", "error_code_ids", "diagnosis_labels")
        return {name: torch.zeros(rows, self.sequence_length, dtype=torch.int64) for name in names}

    def baselines(self) -> dict[str, float]:
        """Return the perplexity of Kneser-Ney models on the validation targets.

        The result has the form `{"bigram": ..., "trigram": ...}`. The models are counted on the training targets in
        their original order, and evaluated on exactly the rows of `val_dataloader`: the same targets with the same
        preceding tokens.
        """
        prepared = self._prepared
        train = [(sequence.ids, sequence.labels) for sequence in prepared.train_sequences]
        held_out = list(prepared.validation.scored_sequences())
        return {
            name: perplexity(NGram(train, vocab_size=self.vocab_size, order=order), held_out)
            for name, order in (("bigram", 2), ("trigram", 3))
        }

    @override
    def describe_line(self) -> str:
        prepared = self._prepared
        sides = prepared.parts.describe_line(
            train=f"{prepared.train.scored_tokens:,} scored tokens in {len(prepared.train):,} rows",
            validation=f"{prepared.validation.scored_tokens:,} tokens",
        )
        left_out = f"; {prepared.texts_left_out:,} plain texts left out" if prepared.texts_left_out else ""
        return f"{sides}{left_out}; vocabulary of {self.vocab_size:,} tokens"

    def describe(self) -> dict[str, Any]:
        """Return counts of documents, dropped lines, rows and targets, and bytes of UTF-8."""
        prepared, parts = self._prepared, self._prepared.parts
        return {
            "source": self.source,
            "vocabulary": self.vocab_size,
            "sequence_length": self.sequence_length,
            "loss_on": self.loss_on,
            "texts_left_out": prepared.texts_left_out,
            "train": _side(parts.train, prepared.train) | {"batches": len(prepared.train) // self.batch_size},
            "validation": _side(parts.validation, prepared.validation)
            | {"batches": -(-len(prepared.validation) // self.options.rows_of_validation)},
            "dropped_from_validation": {
                "lines": parts.dropped_lines,
                "of_lines": parts.validation_lines,
                "bytes": parts.dropped_bytes,
                "of_bytes": parts.validation_bytes,
            },
        }

    @cached_property
    def _prepared(self) -> _Prepared:
        asked, seed = self.hparams, self.options.seed
        documents = corpora.load(self.source, path=asked["path"], max_groups=asked["max_groups"], seed=seed)
        texts_left_out = 0
        if self.loss_on == "answer":
            records = [document for document in documents if document.record is not None]
            texts_left_out = len(documents) - len(records)
            if not records:
                raise ValueError(
                    f"data.loss_on=answer scores cause and solution of records, and data.source={self.source} has only plain "
                    "texts; set data.loss_on=all."
                )
            documents = records
        parts = split(documents, fraction=asked["val_fraction"], seed=seed)
        texts = [document.content for document in parts.train]
        tokenizer = load_or_train_tokenizer(asked["tokenizer_file"], texts, vocab_size=asked["vocab_size"])
        train_sequences = sequences(tokenizer, parts.train, loss_on=self.loss_on)
        train = self._divided(train_sequences, stride=self.sequence_length - 1)
        held_out = sequences(tokenizer, parts.validation, loss_on=self.loss_on)
        validation = self._divided(held_out, stride=self.sequence_length // 2)
        buckets = self._buckets(train_sequences + held_out)
        return _Prepared(
            parts=parts,
            texts_left_out=texts_left_out,
            tokenizer=tokenizer,
            train_sequences=train_sequences,
            train=Rows(train, buckets=buckets),
            validation=Rows(validation, buckets=buckets),
        )

    def _divided(self, found: list[Sequence], *, stride: int) -> list[Sequence]:
        """Divide the stream of texts into windows; records stay whole and must fit."""
        rows = []
        for sequence in found:
            pieces = [sequence] if sequence.is_record else windows(sequence, length=self.sequence_length, stride=stride)
            rows.extend(pieces)
        longest = max(len(row.ids) for row in rows)
        if longest > self.sequence_length:
            too_long = sum(len(row.ids) > self.sequence_length for row in rows)
            raise ValueError(
                f"{too_long} record(s) have more than data.sequence_length={self.sequence_length} tokens, the longest {longest}; "
                f"set data.sequence_length={longest} or more, or shorten them: a record is never divided."
            )
        return rows

    def _buckets(self, found: list[Sequence]) -> list[int]:
        lengths = [len(sequence.ids) for sequence in found if sequence.is_record]
        buckets = choose_buckets(np.array(lengths), longest=self.sequence_length) if lengths else []
        if len(lengths) < len(found) and self.sequence_length not in buckets:
            buckets.append(self.sequence_length)
        return buckets


def _side(documents: list, rows: Rows) -> dict[str, Any]:
    return {
        "documents": len(documents),
        "records": sum(document.record is not None for document in documents),
        "groups": len({document.group for document in documents}),
        "bytes": sum(len(document.content.encode()) for document in documents),
        "rows": len(rows),
        "scored_tokens": rows.scored_tokens,
        "buckets": rows.buckets.tolist(),
    }
