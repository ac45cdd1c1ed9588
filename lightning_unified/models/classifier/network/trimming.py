"""Trim a micro-batch's common padding to a few fixed lengths.

The trimming does not wait for the device. No token attends to pads, so dropping trailing columns of pads changes no prediction.
A batch with pads elsewhere is not changed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROW_LENGTHS", "fixed_length", "padded_mask", "trimmed", "with_row_lengths"]

ROW_LENGTHS = "row_lengths"
_COLUMNS = ("input_ids", "attention_mask", "token_type_ids")


def with_row_lengths(batch: Any) -> Any:
    """Add the rows' lengths, as plain numbers, to a batch on the CPU.

    Other batches stay unchanged. The list is split with the rows, and the step reads it without waiting for an
    accelerator.
    """
    if not isinstance(batch, Mapping) or ROW_LENGTHS in batch or not _is_known(batch.get("attention_mask")):
        return batch
    mask = batch["attention_mask"]
    if mask.device.type != "cpu":
        return batch
    places, real = torch.arange(1, mask.shape[1] + 1), mask.bool()
    # pads before or between tokens: such a batch cannot be trimmed
    lengths, counts = (real * places).amax(1), real.sum(1)
    if not torch.equal(lengths, counts):
        return batch
    return {**batch, ROW_LENGTHS: lengths.tolist()}


def trimmed(batch: Mapping[str, Any], *, lengths: Sequence[int]) -> dict[str, Any]:
    """Trim the batch to the least of `lengths` that holds its longest row.

    A batch without values is never trimmed: a plan needs the largest memory of this batch size.
    """
    ids, rows = batch["input_ids"], batch.get(ROW_LENGTHS)
    if not rows or not _is_known(ids):
        return dict(batch)
    length = fixed_length(max(rows), lengths=lengths, longest=ids.shape[1])
    return {name: value[:, :length] if name in _COLUMNS else value for name, value in batch.items()}


def padded_mask(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the mask (B, T), or None if no row has a pad: attention is faster without a mask."""
    ids, rows = batch["input_ids"], batch.get(ROW_LENGTHS)
    if rows and _is_known(ids) and min(rows) == ids.shape[1]:
        return None
    return batch["attention_mask"]


def fixed_length(needed: int, *, lengths: Sequence[int], longest: int) -> int:
    """Return the least of `lengths` that is at least `needed`, and never more than `longest`."""
    return min((length for length in lengths if needed <= length < longest), default=longest)


def _is_known(value: Any) -> bool:
    return type(value) is Tensor and not value.is_meta
