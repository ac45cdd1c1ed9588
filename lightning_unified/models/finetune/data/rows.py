"""Encoded examples as whole batches: one example a row, or several packed into one."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.data.packing import IGNORED, PaddedRows, choose_buckets
from lightning_unified.models.finetune.data.answers import Encoded

__all__ = ["ExampleRows", "bins_of"]

_BUCKETS = 8  # lengths that rows are padded to; each is a shape to plan


def bins_of(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return which sequences share a row.

    From the longest on, each goes into the row with the least room that it fits. Source of this order: Johnson 1973,
    "Near-optimal bin packing algorithms" (best fit decreasing).
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each row that has some, and its number
    for index in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        size = lengths[index]
        place = bisect_left(room, (size, -1))
        left, number = room.pop(place) if place < len(room) else (capacity, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        if left > size:
            insort(room, (left - size, number))
    return bins


class ExampleRows(PaddedRows):
    """Encoded examples, one or several a row.

    A batch has `tokens` (B, S) int64, pads at the end, and `labels` (B, S) int64: the token where it is scored, else -100. Packed rows
    also have `positions` (B, S) int64, which begin at 0 with each sequence: sequences of a row do not attend to each other. The first
    token of a sequence is never scored.

    Args:
        sequences: The examples' tokens.
        length: The most tokens of a row.
        packed: Whether a row holds several sequences.
        pad_id: Fills the ends of rows.
    """

    def __init__(self, sequences: Sequence[Encoded], *, length: int, packed: bool, pad_id: int) -> None:
        sizes = [len(one.ids) for one in sequences]
        bins = bins_of(sizes, capacity=length) if packed else [[index] for index in range(len(sizes))]
        ordered = [sequences[index] for members in bins for index in members]
        lengths = [sum(sizes[index] for index in members) for members in bins]
        ids = np.concatenate([one.ids for one in ordered])
        positions = np.concatenate([np.arange(len(one.ids), dtype=np.int32) for one in ordered])
        scored = np.concatenate([one.scored for one in ordered]) & (positions > 0)
        labels = np.where(scored, ids, IGNORED).astype(np.int32)
        fields = {"tokens": (ids, pad_id), "labels": (labels, IGNORED)}
        if packed:
            fields["positions"] = (positions, 0)
        buckets = [length] if packed else choose_buckets(lengths, longest=length, most=_BUCKETS)
        super().__init__(fields, lengths=lengths, buckets=buckets)
        self.packed = packed

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows, without pads."""
        return len(self._ids)

    @override
    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        if self.packed:  # pads are a sequence of their own
            positions = batch["positions"]
            for row, index in enumerate(indices):
                pads = positions[row, self.lengths[index] if index >= 0 else 0 :]
                pads.copy_(torch.arange(len(pads)))
        return batch
