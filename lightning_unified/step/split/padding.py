"""Trim the padding of micro-batches to their longest rows, as a collate function of fewer rows does.

A collate function pads sequences to the longest one of the batch, and often adds a field of their lengths. A step may go by the longest
length that it gets: `pad_packed_sequence` returns so many places, and so has a mask of `torch.arange(lengths.max())`. A micro-batch
without the batch's longest row then has more places than its own lengths tell.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.split.containers import (
    PLAIN,
    entries_of,
    is_list_of_plain,
    is_sequence,
    joined,
    with_entries,
)
from lightning_unified.step.split.roles import Role, Roles

__all__ = ["lengths_in", "trimmed"]


def lengths_in(batch: Any, roles: Roles) -> list[list[int]]:
    """Return the lengths of the rows, by each field that tells them.

    The largest number of such a field is a dimension of a padded field.

    Args:
        batch: The batch.
        roles: The roles of its entries by path.
    """
    numbers, dimensions = list[list[int]](), set[int]()
    for value in _leaves(batch, "", roles):
        if not isinstance(value, Tensor):
            numbers.append(value)
            continue
        dimensions.update(value.shape[1:])
        if not (value.is_floating_point() or value.is_complex()) and value.dim() and value.numel() == len(value):
            try:
                numbers.append(value.flatten().tolist())
            except RuntimeError:  # the fake tensors of a dry run have no values
                continue
    return [one for one in numbers if 0 < min(one) < max(one) and max(one) in dimensions]


def trimmed(micro_batch: Any, lengths: Sequence[Sequence[int]], start: int, stop: int, roles: Roles) -> Any:
    """Return rows `start` to `stop` of a batch without the places that only its other rows fill.

    A dimension that is as long as the longest row is cut at the longest of these rows, if all that follows is one number: the padding.

    Args:
        micro_batch: These rows, padded as the batch is.
        lengths: The lengths of all rows of the batch, by each field that tells them.
        start: The first row.
        stop: The row after the last one.
        roles: The roles of the batch's entries by path.
    """
    cuts = {(max(one), max(one[start:stop])) for one in lengths}
    cuts = {(longest, own) for longest, own in cuts if own < longest}
    return _cut(micro_batch, "", cuts, roles) if cuts else micro_batch


def _leaves(value: Any, path: str, roles: Roles) -> list[Any]:
    """Return the tensors and the lists of whole numbers that are split by rows."""
    if isinstance(value, Tensor):
        is_dense = not value.is_nested and value.layout == torch.strided
        return [value] if is_dense and roles.get((path, "leaf")) is Role.ROWS else []
    if isinstance(value, PLAIN):
        return []
    if is_sequence(value) and roles.get((path, "list")) is not Role.COLUMNS:
        is_numbers = is_list_of_plain(value) and value and all(type(one) is int for one in value)
        return [list(value)] if is_numbers and roles.get((path, "list")) is Role.ROWS else []
    entries = entries_of(value) or ()
    return [leaf for key, entry in entries for leaf in _leaves(entry, joined(path, key), roles)]


def _cut(value: Any, path: str, cuts: set[tuple[int, int]], roles: Roles) -> Any:
    if isinstance(value, Tensor):
        for leaf in _leaves(value, path, roles):
            return _without_padding(leaf, cuts)
        return value
    if isinstance(value, PLAIN) or (is_sequence(value) and roles.get((path, "list")) is not Role.COLUMNS):
        return value
    entries = entries_of(value)
    if entries is None:
        return value
    return with_entries(value, [(key, _cut(entry, joined(path, key), cuts, roles)) for key, entry in entries])


def _without_padding(value: Tensor, cuts: set[tuple[int, int]]) -> Tensor:
    for dim in range(1, value.dim()):
        for longest, own in cuts:
            if value.shape[dim] == longest and _is_one_number(value.narrow(dim, own, longest - own)):
                value = value.narrow(dim, 0, own)
                break
    return value


def _is_one_number(value: Tensor) -> bool:
    if not value.numel():
        return False
    first = value.flatten()[:1]
    return bool((value == first).all()) or bool(value.isnan().all())
