"""Passages: rows of at most T tokens of one document, each with its continuation.

Shapes:
    A row has up to T tokens, and up to U tokens of continuation; a batch (B, T) and (B, U).
"""

import zlib

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.loader import BatchRows

__all__ = ["PAD_ID", "Passages"]

PAD_ID = 0  # arbitrary: the mask identifies pads


class Passages(BatchRows):
    """Passages in flat arrays, small to pickle for spawned workers; they return whole batches.

    A batch is a dict: `input_ids` (B, T) int64 and `mask` (B, T) bool, True at tokens; with U above 0 also `continuation`
    (B, U) and `continuation_mask` (B, U): the tokens after the passage in its document, which the next passage begins with.

    Args:
        documents: Token ids of each document.
        length: T, the longest passage in tokens.
        continuation_length: U, the longest continuation in tokens; 0 for none.
        shortest: Tokens below which the last piece of a document is left out.
    """

    def __init__(
        self, documents: list[np.ndarray], *, length: int, continuation_length: int = 0, shortest: int = 1
    ) -> None:
        self.length, self.continuation_length = length, continuation_length
        starts, stops, ends = [], [], []
        offset = left_out = 0
        for ids in documents:
            for start in range(0, len(ids), length):
                size = min(length, len(ids) - start)
                if size < shortest:
                    left_out += size
                    continue
                starts.append(offset + start)
                stops.append(offset + start + size)
                ends.append(offset + len(ids))
            offset += len(ids)
        self._starts, self._stops, self._ends = (np.array(values, dtype=np.int64) for values in (starts, stops, ends))
        self._ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in documents])
        self.left_out = left_out
        self.bucket_of = np.zeros(len(starts), dtype=np.int64)
        places = np.stack([self._starts, self._stops, self._ends]).tobytes()
        self.checksum = zlib.crc32(places, zlib.crc32(self._ids.tobytes()))

    @property
    def tokens(self) -> int:
        """Tokens of all passages together."""
        return int((self._stops - self._starts).sum())

    @override
    def __len__(self) -> int:
        return len(self._starts)

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        rows = len(indices)
        batch = {
            "input_ids": torch.full((rows, self.length), PAD_ID),
            "mask": torch.zeros(rows, self.length, dtype=torch.bool),
        }
        if self.continuation_length:
            batch["continuation"] = torch.full((rows, self.continuation_length), PAD_ID)
            batch["continuation_mask"] = torch.zeros(rows, self.continuation_length, dtype=torch.bool)
        for row, index in enumerate(indices):
            if index < 0:
                continue
            stop = int(self._stops[index])
            self._put(batch["input_ids"][row], batch["mask"][row], start=int(self._starts[index]), stop=stop)
            if self.continuation_length:
                end = min(stop + self.continuation_length, int(self._ends[index]))
                self._put(batch["continuation"][row], batch["continuation_mask"][row], start=stop, stop=end)
        return batch

    def _put(self, ids: Tensor, mask: Tensor, *, start: int, stop: int) -> None:
        ids[: stop - start] = torch.from_numpy(self._ids[start:stop])
        mask[: stop - start] = True
