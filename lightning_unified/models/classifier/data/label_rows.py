"""Rows of token ids with a class, as batches padded to one of a few fixed lengths.

Kernels, compiled graphs and cached buffers are made for one shape, so the lengths are few and fixed. Padding each batch to its own
longest text is the least work but was the slowest on a GPU. Padding all to the longest text allowed is one shape, but mostly padding.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.loader import BatchRows

__all__ = ["IGNORED", "LabelRows", "zeros"]

IGNORED = -100  # torch.nn.functional.cross_entropy ignores such targets


class LabelRows(BatchRows):
    """Token ids in flat arrays, small to pickle for spawned workers; they return whole batches.

    A batch is a dict: `input_ids` (B, T) int64, `attention_mask` (B, T) bool, True at tokens, `labels` (B,) int64. T is the
    smallest of `lengths` that holds the longest row of the batch.

    Args:
        texts: Token ids of each text.
        labels: The class of each.
        lengths: Lengths to pad to, ascending; the last is at least that of every text.
        pad_id: The id of padding.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], labels: Sequence[int], *, lengths: Sequence[int], pad_id: int
    ) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.sizes = np.array([len(ids) for ids in texts], dtype=np.int64)
        self.labels = np.array(labels, dtype=np.int64)
        self.bucket_of = np.searchsorted(self.lengths, self.sizes)
        self.pad_id = pad_id
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        # one more entry: lookups also occur for no texts and beyond the last text
        self._ids = np.array([each for ids in texts for each in ids] + [pad_id], dtype=np.int32)
        self.checksum = zlib.crc32(
            np.concatenate([self.labels, self.sizes, self.lengths]).tobytes(), zlib.crc32(self._ids.tobytes())
        )

    def length_of(self, indices: Sequence[int]) -> int:
        """Return the length to which a batch of these rows is padded."""
        return int(self.lengths[max((self.bucket_of[index] for index in indices if index >= 0), default=0)])

    def class_counts(self, classes: int) -> list[int]:
        """Return the number of rows of each class."""
        return np.bincount(self.labels, minlength=classes).tolist()

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of the rows `indices`; -1 stands for a row without a class.

        The mask of such a row is True at the first position, a pad: attention over nothing would be 0 / 0.
        """
        rows = np.array(indices)
        sizes = np.where(rows < 0, 0, self.sizes[rows])
        places = np.arange(self.length_of(indices))
        mask = places < sizes[:, None]
        ids = np.where(mask, self._ids[np.where(mask, self._starts[rows][:, None] + places, -1)], self.pad_id)
        mask[:, 0] = True
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "attention_mask": torch.from_numpy(mask),
            "labels": torch.from_numpy(np.where(rows < 0, IGNORED, self.labels[rows])),
        }


def zeros(rows: int, length: int) -> dict[str, Tensor]:
    """Return a batch of zeros in the form of `LabelRows`, without padding."""
    return {
        "input_ids": torch.zeros(rows, length, dtype=torch.int64),
        "attention_mask": torch.ones(rows, length, dtype=torch.bool),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }
