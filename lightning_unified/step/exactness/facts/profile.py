"""Batch profiles: values, zeros, masks and lengths that no checked batch had.

A loss may mix rows for some data only. For instance, a row without observations takes the batch's mean, or a missing class changes a
weight. So a batch with new facts is checked before its update. A profile is a set of facts about each tensor of the batch:

| fact | data | purpose |
|---|---|---|
| the values that occur | integers within a range of 64, texts | detect a new label |
| the order of magnitude of the largest and smallest, and whether the largest is 255 | other integers | detect larger values and void pixels |
| the order of magnitude of the largest size, in steps of 8; whether there are negative ones | floating-point numbers | detect outliers, which a loss may filter, scale or clamp |
| the order of magnitude of the share of zeros, and of labels that losses ignore | every tensor | detect the first padding |
| the order of magnitude of the share of rows that begin or end with the same number twice | integers | detect padding by any number |
| whether a row has only zeros, or no zeros; whether there is NaN or infinity | every tensor | detect the first row without observations |
| the order of magnitude of the longest and the shortest row, and of the row's size | every tensor | detect new lengths |
| the order of magnitude of the number of values that rows share | texts, and numbers with up to 4 entries a row | detect rows with the same id, which a loss may compare or count once |
| whether two rows are equal | tensors with more entries a row | detect rows that a loss may compare, or count once |
| whether the entries of all rows are as long; the order of magnitude of the longest and the shortest | lists of tensors or lists, packed and nested tensors | detect the first ragged batch |

Other orders of magnitude are powers of two, so that new facts become rare.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_unified.step.exactness.facts.fields import arrays_of, columns_of, lengths_of, named_tensors
from lightning_unified.step.exactness.facts.figures import KINDS, HostFigures, figures_of

__all__ = ["SHARED", "BatchProfiles", "facts_of"]

SHARED = "shared"  # the kind of the facts about values that rows share

_VOID = 255  # the label of unlabelled pixels in segmentation maps

# values of one path that may be new facts; judgement: phases and switches are few
_MOST = {"value": KINDS, "attribute": 8, "graph": 8, "bends": 32}

Fact = tuple[str, str, Any]


def facts_of(batch: Any, rows: int, known: HostFigures | None = None) -> frozenset[Fact]:
    """Return the facts about the tensors, arrays and lists of `batch` with one entry per row.

    Figures of tensors that `known` lacks are copied to the host in one transfer if all lie on one device.
    """
    named = [(path, leaf) for path, leaf in (*named_tensors(batch), *arrays_of(batch)) if _has_rows(leaf, rows)]
    facts: set[Fact] = set()
    for path, column in columns_of(batch, rows):
        facts |= {(path, "value", value) for value in column}
        facts |= _facts_of_shared(path, sum(count > 1 for count in Counter(column).values()))
    for path, lengths in lengths_of(batch, rows):
        facts |= _length_facts(path, lengths)
    for (path, leaf), own in zip(named, figures_of([leaf for _, leaf in named], known), strict=True):
        facts |= _float_facts(path, leaf, own) if leaf.is_floating_point() else _integer_facts(path, leaf, own)
    return frozenset(facts)


def _length_facts(path: str, lengths: Sequence[int]) -> set[Fact]:
    """Return the facts about the lengths of the rows' entries, such as the points or the objects of each."""
    return {
        (path, "alike", len(set(lengths)) == 1),
        (path, "longest entry", _order(max(lengths))),
        (path, "shortest entry", _order(min(lengths))),
    }


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return (
        leaf.dim() > 0
        and leaf.shape[0] == rows
        and leaf.numel() > 0
        and leaf.layout == torch.strided
        and not leaf.is_complex()
    )


def _float_facts(path: str, leaf: Tensor, figures: Sequence[int]) -> set[Fact]:
    zeros, bad, fewest, _, most, _, shared, size, has_negative = figures
    facts = _facts_of_zeros(path, leaf, zeros, fewest=fewest, most=most) | _facts_of_shared(path, shared)
    return facts | {(path, "not finite", bad > 0), (path, "size", size), (path, "negative", has_negative)}


def _integer_facts(path: str, leaf: Tensor, figures: Sequence[int]) -> set[Fact]:
    low, high, shared, zeros, ignored, repeats, fewest, _, _, most, most_ignored, _, *occurs = figures
    rows, size = leaf.shape[0], leaf.numel() // leaf.shape[0]
    facts = _facts_of_zeros(path, leaf, zeros, fewest=fewest, most=most) | _facts_of_shared(path, shared)
    if high - low < KINDS:
        within = range(low, high + 1)
        values = [value for value in within if occurs[value % KINDS]] if occurs else leaf.unique().tolist()
        facts |= {(path, "value", value) for value in values}
    else:
        facts |= {(path, "lowest", _signed_order(low)), (path, "highest", _signed_order(high))}
        facts.add((path, "void", high == _VOID))
    facts.add((path, "ignored", _share(ignored, rows * size)))
    if size > 1:
        facts |= {(path, "row of ignored", most_ignored == size), (path, "repeats at an end", _share(repeats, rows))}
    else:
        facts.add((path, "all ignored", ignored == rows))
    return facts


def _facts_of_shared(path: str, number: int) -> set[Fact]:
    """Return the facts about how many values rows share.

    One value may stand for none, such as an id of -1. With fewer shared values, a loss has less to compare, so all smaller orders are facts too.
    """
    return {(path, SHARED, order) for order in range(1, _order(number) + 1)}


def _facts_of_zeros(path: str, leaf: Tensor, zeros: int, *, fewest: int, most: int) -> set[Fact]:
    """Return the facts about row size and zeros.

    Args:
        path: The leaf's path.
        leaf: The leaf, with one entry per row.
        zeros: The number of zeros in the leaf.
        fewest: The number of zeros in the row with the fewest.
        most: The number of zeros in the row with the most.
    """
    rows, size = leaf.shape[0], leaf.numel() // leaf.shape[0]
    facts: set[Fact] = {(path, "row size", _order(size)), (path, "zeros", _share(zeros, rows * size))}
    if size == 1:
        return facts | {(path, "all zero", zeros == rows)}
    facts |= {(path, "row of zeros", most == size), (path, "row without zeros", fewest == 0)}
    return facts | {(path, "shortest row", _order(size - most)), (path, "longest row", _order(size - fewest))}


def _order(number: float) -> int:
    """Return the exponent of the power of two just above a count; 0 for a count of 0."""
    return int(number).bit_length()


def _signed_order(number: float) -> int:
    return _order(abs(number)) * (1 if number >= 0 else -1)


def _share(count: float, of: int) -> int | None:
    """Return the order of magnitude of the share `count / of`; None for a count of 0."""
    return _order(of / count) if count else None


class BatchProfiles:
    """The facts of all batches that have been checked.

    Some fields and attributes are new in every batch, such as sample numbers or the name of the last file. After 64 checked values of one
    field, 8 of one attribute, 8 graphs or 32 at one bend of the loss, further values are therefore no new facts.
    """

    def __init__(self) -> None:
        self._known: set[Fact] = set()
        self._values: Counter[tuple[Any, ...]] = Counter()

    def news(self, facts: frozenset[Fact]) -> frozenset[Fact]:
        """Return the facts that no checked batch had."""
        return frozenset(fact for fact in facts - self._known if not self._varies(fact))

    def add(self, facts: frozenset[Fact]) -> None:
        """Record that batches with these facts have been checked."""
        self._values.update(map(_field_of, facts - self._known))
        self._known |= facts

    def _varies(self, fact: Fact) -> bool:
        return fact[1] in _MOST and self._values[_field_of(fact)] >= _MOST[fact[1]]


def _field_of(fact: Fact) -> tuple[Any, ...]:
    """Return what the values of a fact are counted by: its path and kind, and its place for a bend of the loss.

    A loss of many terms has many bends, whose facts must not use up those of one.
    """
    path, kind, value = fact
    return (path, kind, *value[1:3]) if kind == "bends" and len(value) > 2 else (path, kind)
