"""What is new in a batch: values, zeros, masks and lengths outside those of batches that have been checked.

A loss may mix rows for some data only: a row without observations takes the batch's mean, a class that is missing changes a weight. So a
batch that differs in kind from those checked is checked too, before its update. A profile is a set of facts about each tensor of the batch:

| fact | of | so that |
|---|---|---|
| the values that occur | whole numbers with at most 64 different ones, texts | a new or a missing label is seen |
| the order of magnitude of the largest and smallest, and whether the largest is 255 | other whole numbers | |
| the order of magnitude of the share of zeros, and of labels of -100 | every tensor | the first padding is seen |
| the order of magnitude of the share of rows that begin or end with the same number twice | whole numbers | padding by any number is seen |
| whether a row has nothing but zeros; none at all; NaN or infinity | every tensor | the first row without observations is seen |
| the order of magnitude of the longest and the shortest row, and of the row's size | every tensor | |

Orders of magnitude are powers of two, so that new facts become rare.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.training.exactness.host_fields import arrays_of, columns_of
from lightning_unified.training.exactness.leaves import named_tensors

__all__ = ["BatchProfiles", "facts_of"]

_KINDS = 64  # different whole numbers up to which each is a fact of its own
_IGNORED = -100
_VOID = 255  # of segmentation maps

_MOST = {"value": _KINDS, "attribute": 8}  # values of one path that are news; judgement: phases and switches are few

Fact = tuple[str, str, Any]


def facts_of(batch: Any, rows: int) -> frozenset[Fact]:
    """Return the facts about the tensors, arrays and lists of `batch` that have one entry for each of its `rows`; one transfer from the device."""
    leaves = [
        (path, leaf.detach()) for path, leaf in (*named_tensors(batch), *arrays_of(batch)) if _has_rows(leaf, rows)
    ]
    listed = {(path, "value", value) for path, column in columns_of(batch, rows) for value in column}
    if not leaves:
        return frozenset(listed)
    figures = [_figures(leaf) for _, leaf in leaves]
    numbers = (
        torch.cat([one.cpu() if one.device.type != figures[0].device.type else one for one in figures]).cpu().tolist()
    )
    facts: set[Fact] = listed
    for index, (path, leaf) in enumerate(leaves):
        facts |= _facts(path, leaf, numbers[index * _COUNT : (index + 1) * _COUNT])
    return frozenset(facts)


_COUNT = 9


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return (
        leaf.dim() > 0
        and leaf.shape[0] == rows
        and leaf.numel() > 0
        and leaf.layout == torch.strided
        and not leaf.is_complex()
    )


def _figures(leaf: Tensor) -> Tensor:
    """Return lowest, highest, zeros, ignored, non-finite, zeros of the row with fewest and with most, ignored of the one with most, and
    how many rows repeat a number at an end.
    """
    flat = leaf.reshape(leaf.shape[0], -1)
    zeros = (flat == 0).sum(1)
    if leaf.is_floating_point():
        bad = (~flat.isfinite()).sum()
        low = high = ignored = most_ignored = repeats = torch.zeros((), device=leaf.device)
    else:
        whole = flat.long()
        low, high, bad = whole.min(), whole.max(), torch.zeros((), device=leaf.device)
        ignored_by_row = (flat == _IGNORED).sum(1) if leaf.dtype not in (torch.bool, torch.uint8) else zeros * 0
        ignored, most_ignored = ignored_by_row.sum(), ignored_by_row.max()
        repeats = ((flat[:, 0] == flat[:, :2][:, -1]) | (flat[:, -1] == flat[:, -2:][:, 0])).sum()
    figures = (low, high, zeros.sum(), ignored, bad, zeros.min(), zeros.max(), most_ignored, repeats)
    return torch.stack([one.to(torch.float32 if leaf.device.type == "mps" else torch.float64) for one in figures])


def _facts(path: str, leaf: Tensor, figures: Sequence[float]) -> set[Fact]:
    low, high, zeros, ignored, bad, fewest, most, most_ignored, repeats = figures
    rows, size = leaf.shape[0], leaf.numel() // leaf.shape[0]
    facts: set[Fact] = {(path, "row size", _order(size))}
    if not leaf.is_floating_point() and high - low < _KINDS:
        facts |= {(path, "value", value) for value in leaf.reshape(-1).unique().tolist()}
    elif not leaf.is_floating_point():
        facts |= {(path, "lowest", _signed_order(low)), (path, "highest", _signed_order(high))}
        facts.add((path, "void", high == _VOID))
    facts |= {(path, "zeros", _share(zeros, rows * size)), (path, "ignored", _share(ignored, rows * size))}
    facts.add((path, "not finite", bad > 0))
    if size > 1:
        facts |= {(path, "row of zeros", most == size), (path, "row without zeros", fewest == 0)}
        facts |= {(path, "shortest row", _order(size - most)), (path, "longest row", _order(size - fewest))}
        facts |= {(path, "row of ignored", most_ignored == size), (path, "repeats at an end", _share(repeats, rows))}
    else:
        facts |= {(path, "all zero", zeros == rows), (path, "all ignored", ignored == rows)}
    return facts


def _order(number: float) -> int:
    """Return the power of two just above a count; 0 for none."""
    return int(number).bit_length()


def _signed_order(number: float) -> int:
    return _order(abs(number)) * (1 if number >= 0 else -1)


def _share(count: float, of: int) -> int | None:
    """Return the power of two of a share; None where there are none."""
    return _order(of / count) if count else None


class BatchProfiles:
    """The facts of all batches that have been checked.

    A field of sample numbers, or an attribute that holds the last file's name, is new in every batch. So once 64 values of one field,
    or 8 of one attribute, have been checked, further ones are news no longer.
    """

    def __init__(self) -> None:
        self._known: set[Fact] = set()
        self._values: Counter[tuple[str, str]] = Counter()

    def news(self, facts: frozenset[Fact]) -> frozenset[Fact]:
        """Return those of `facts` that no checked batch had."""
        return frozenset(fact for fact in facts - self._known if not self._varies(fact))

    def add(self, facts: frozenset[Fact]) -> None:
        """Note that batches with these facts have been checked."""
        self._values.update(fact[:2] for fact in facts - self._known)
        self._known |= facts

    def _varies(self, fact: Fact) -> bool:
        path, kind, _ = fact
        return kind in _MOST and self._values[path, kind] >= _MOST[kind]
