"""Turn documents into rows: token ids, targets, error codes and the padded length.

Plain texts become one stream, `<s> text </s> <s> text </s> ...`, divided into windows of T tokens. A window begins before the
first token it scores, so that every token but the stream's first has a context. Each token is scored exactly once:

- training: each window begins with the last token of the one before (stride T - 1);
- validation: windows advance by T // 2, and each scores its last T // 2 tokens: every token has at least T // 2 tokens of
  context, or all there are.

`<s>` and the first position of a row are never scored. Models that shift the labels and models that do not then count the same
number of targets.

Records are one row each, padded up to one of a few lengths.

Shapes:
    A row has up to T tokens; a batch (B, L), L the bucket of its longest row.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.documents import error_codes as codes
from lightning_unified.data.documents import record as layout
from lightning_unified.data.documents.document import Document
from lightning_unified.data.loader import BatchRows
from lightning_unified.data.tokenizer import encode_records, encode_texts

__all__ = ["IGNORED", "PaddedRows", "Rows", "Sequence", "choose_buckets", "sequences", "windows"]

IGNORED = -100  # torch.nn.functional.cross_entropy ignores such targets
_MULTIPLE = 16  # buckets are multiples of this: fast for tensor cores and MPS kernels, and fewer shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Tokens with their targets, error codes and diagnosis labels; four arrays of one length.

    Attributes:
        ids: int32 token ids.
        scored: Whether the token is a target.
        codes: int32; the id of an error code at its last token, else 0. At an earlier token, the id would give away tokens
            still to be predicted.
        diagnosis: int8; the subsystem (0 to 63) at the token where the diagnostic head predicts it, else -100.
        is_record: Whether this is one record, which is never divided, or a stream of texts.
    """

    ids: np.ndarray
    scored: np.ndarray
    codes: np.ndarray
    diagnosis: np.ndarray
    is_record: bool = False

    @property
    def labels(self) -> np.ndarray:
        """The ids of scored tokens, -100 elsewhere."""
        return np.where(self.scored, self.ids, IGNORED).astype(np.int32)

    def part(self, start: int, stop: int, *, scored_from: int) -> "Sequence":
        """Return the tokens from `start` to `stop`; those before `scored_from` are context only."""
        scored = self.scored[start:stop].copy()
        scored[: scored_from - start] = False
        return Sequence(
            ids=self.ids[start:stop], scored=scored, codes=self.codes[start:stop], diagnosis=self.diagnosis[start:stop]
        )


def sequences(tokenizer: Tokenizer, documents: list[Document], *, loss_on: Literal["all", "answer"]) -> list[Sequence]:
    """Return the stream of all plain texts, if there are any, then one sequence for each record.

    Args:
        tokenizer: The tokenizer.
        documents: Texts and records.
        loss_on: `"all"` scores every token of a record, `"answer"` only those after `<cause>`.
    """
    texts = [document.content for document in documents if document.record is None]
    records = [document.record for document in documents if document.record is not None]
    found = []
    if texts:
        parts = [[layout.BOS_ID, *ids, layout.EOS_ID] for ids in encode_texts(tokenizer, texts)]
        found.append(_plain(np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])))
    rendered = [layout.render(record) for record in records]
    for record, text, encoding in zip(records, rendered, encode_records(tokenizer, rendered), strict=True):
        found.append(_record(record, text, encoding, loss_on=loss_on))
    return found


def windows(sequence: Sequence, *, length: int, stride: int) -> Iterator[Sequence]:
    """Yield windows of up to `length` tokens that start `stride` apart.

    Together, the windows score each token once. The first window scores all its tokens but the first. Each later window
    scores the tokens that no earlier window holds.
    """
    scored_to = 1
    for start in range(0, len(sequence.ids), stride):
        stop = min(start + length, len(sequence.ids))
        if stop <= scored_to:
            break
        yield sequence.part(start, stop, scored_from=scored_to)
        scored_to = stop


def choose_buckets(lengths: ArrayLike, *, longest: int, most: int = 4, multiple: int = _MULTIPLE) -> list[int]:
    """Return at most `most` lengths to pad to, chosen for the least padding; the exact optimum.

    Args:
        lengths: Tokens of each row, none above `longest`.
        longest: No bucket is longer.
        most: Number of buckets. Each is a shape to compile and a set of buffers, so few are better than a perfect fit.
        multiple: Every bucket but the longest is a multiple of this.
    """
    rounded = np.minimum(-(-np.asarray(lengths) // multiple) * multiple, longest)
    sizes, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    # cost[j] is the least padded total of all rows up to size j; best[j] holds its buckets
    cost = [0.0] + [np.inf] * len(sizes)
    best: list[list[int]] = [[] for _ in range(len(sizes) + 1)]
    for _ in range(min(most, len(sizes))):
        new_cost, new_best = list(cost), list(best)
        for end in range(1, len(sizes) + 1):
            for start in range(end):
                total = cost[start] + float(below[end] - below[start]) * float(sizes[end - 1])
                if total < new_cost[end]:
                    new_cost[end], new_best[end] = total, [*best[start], int(sizes[end - 1])]
        cost, best = new_cost, new_best
    return best[-1]


class PaddedRows(BatchRows):
    """Rows of tokens in flat arrays that return whole, padded batches of int64 tensors.

    Flat arrays are small to pickle for spawned workers.

    Args:
        fields: Tensors of a batch by name, each with the values of all rows, one row after the other, and the value of pads. The
            first holds the token ids, and `labels` the targets, -100 where not scored.
        lengths: Number of tokens of each row.
        buckets: Lengths that batches are padded to, ascending.
    """

    def __init__(self, fields: Mapping[str, tuple[np.ndarray, int]], *, lengths: ArrayLike, buckets: ArrayLike) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.buckets = np.array(buckets, dtype=np.int64)
        self.bucket_of = np.searchsorted(self.buckets, self.lengths)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._fields = dict(fields)
        self._ids, self._labels = next(iter(fields.values()))[0], fields["labels"][0]
        self.checksum = zlib.crc32(self._labels.tobytes(), zlib.crc32(self._ids.tobytes()))

    @property
    def scored_tokens(self) -> int:
        """Number of targets in all rows."""
        return int((self._labels != IGNORED).sum())

    @override
    def __len__(self) -> int:
        return len(self.lengths)

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        places = [index for index in indices if index >= 0]
        shape = (len(indices), int(self.buckets[self.bucket_of[places].max() if places else 0]))
        batch = {name: torch.full(shape, pad) for name, (_, pad) in self._fields.items()}
        for row, index in enumerate(indices):
            if index >= 0:
                start, stop = self._starts[index], self._starts[index + 1]
                for name, (values, _) in self._fields.items():
                    batch[name][row, : stop - start] = torch.from_numpy(values[start:stop])
        return batch


class Rows(PaddedRows):
    """Rows of documents.

    A batch is a dict of int64 tensors (B, L): `input_ids`, `labels` (not shifted, -100 where not scored),
    `error_code_ids` (0 = none) and `diagnosis_labels` (-100 = none). A batch always has all four.
    """

    def __init__(self, rows: list[Sequence], *, buckets: list[int]) -> None:
        lengths = [len(row.ids) for row in rows]
        labels = np.concatenate([row.labels for row in rows])
        labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
        fields = {
            "input_ids": (np.concatenate([row.ids for row in rows]), layout.PAD_ID),
            "labels": (labels, IGNORED),
            "error_code_ids": (np.concatenate([row.codes for row in rows]), 0),
            "diagnosis_labels": (np.concatenate([row.diagnosis for row in rows]), IGNORED),
        }
        super().__init__(fields, lengths=lengths, buckets=buckets)

    def scored_sequences(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and labels of each row without padding, for count-based baselines."""
        for start, stop in zip(self._starts[:-1], self._starts[1:], strict=True):
            yield self._ids[start:stop], self._labels[start:stop]


def _plain(ids: np.ndarray) -> Sequence:
    return Sequence(
        ids=ids,
        scored=ids != layout.BOS_ID,
        codes=np.zeros(len(ids), dtype=np.int32),
        diagnosis=np.full(len(ids), IGNORED, dtype=np.int8),
    )


def _record(record: layout.Record, text: str, encoding: Encoding, *, loss_on: str) -> Sequence:
    """Return the tokens of a record, with codes and diagnosis aligned by character offsets."""
    plain = _plain(np.asarray(encoding.ids, dtype=np.int32))
    starts = np.array([start for start, _ in encoding.offsets])
    plain.codes[:] = codes.align(text, encoding.offsets)
    question, answer = layout.question_offset(text), layout.answer_offset(text)
    if question is None or answer is None:
        raise RuntimeError(f"a rendered record has no question or no answer: {text!r}; this is a defect of the layout.")
    if record.error_codes:
        # the last token that begins at or before the character: one of several bytes may have several tokens
        token = int(np.searchsorted(starts, question - 1, side="right")) - 1
        plain.diagnosis[token] = codes.subsystem(record.error_codes[0])
    if loss_on == "answer":
        plain.scored[starts < answer] = False
    return replace(plain, is_record=True)
