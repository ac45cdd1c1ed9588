"""Choose the rows that a check runs, and split them into unequal micro-batches."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_unified.step.exactness.facts.fields import named_tensors
from lightning_unified.step.exactness.facts.figures import IGNORED, ignored_in_rows, size_and_sign_of
from lightning_unified.step.exactness.losses import LossRule
from lightning_unified.step.split import split_rows

__all__ = ["Check", "splits_of", "starts_of", "window", "windows_over"]

_OF_TWO = {7: [[2, 2, 3], [3, 2, 2]], 8: [[2, 3, 3], [2, 2, 4]]}  # three unequal ones of two units or more do not fit
_WINDOWS = 64  # candidate first rows; judgement: enough to find a rare row, and cheap for thousands of rows


def splits_of(units: int, *, least: int = 1) -> list[list[int]]:
    """Return two splits of `units` units into three unequal micro-batches.

    Two or three units give fewer splits or micro-batches. One unit gives none. A single split into two equal micro-batches accepts
    class weights by coincidence in 6 of 158 batches; three micro-batches do so in none. Two splits distinguish a mean weighted by
    rows from sums and constants.

    Args:
        units: The number of units.
        least: The fewest units of a micro-batch, 1 or 2. Fewer than seven units are split as with 1, because equal micro-batches show too
            little; of seven and eight, two micro-batches are equal.
    """
    if units < 2:
        return []
    if units < 4:
        return [[1] * units, [1, units - 1]][: units - 1]
    if least > 1 and units in _OF_TWO:
        return _OF_TWO[units]
    small = max(units // 6, least if units > 6 else 1)
    middle = max(units // 3, small + (units > 4))
    large = units - small - middle
    moves = units > 5 and large - middle != 2  # else two micro-batches would have the same size
    first, second = [small, middle, large], [large - 1, small, middle + 1] if moves else [large, small, middle]
    return [_with_odd_start(first), _with_odd_start(second)] if units > 6 else [first, second]


def _with_odd_start(sizes: Sequence[int]) -> list[int]:
    """Return three sizes of which not all micro-batches begin at an even row.

    A check runs one of two splits. If all its micro-batches had whole pairs, a loss over pairs of rows would agree.
    """
    first, second, third = sizes
    is_even = not any(start % 2 for start in starts_of(sizes))
    return [first + 1, second, third - 1] if is_even else [first, second, third]


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each micro-batch, for micro-batches of the given sizes."""
    return [sum(sizes[:index]) for index in range(len(sizes))]


def window(batch: Any, *, rows: int, size: int, unit: int, ignored: Collection[int] = (IGNORED,)) -> int:
    """Return the first of the `size` neighbouring rows whose data differ most.

    The data are labels, masks, lengths, missing values, and the sizes and signs of floating-point numbers.

    Args:
        batch: The whole batch.
        rows: The number of rows of the batch.
        size: The number of rows to choose, a multiple of `unit`.
        unit: The number of rows that a split keeps together.
        ignored: Labels that losses ignore.
    """
    features = _features(batch, rows, ignored)
    if size >= rows or features is None:
        return 0
    units = (rows - size) // unit
    step = max(units // _WINDOWS, 1)
    starts = unit * np.unique([*range(0, units + 1, step), units])
    scores = sum(_scores(column, starts, size) for column in features.T)
    return int(starts[np.argmax(scores)])


def windows_over(wanted: range, *, rows: int, size: int) -> list[int]:
    """Return the first rows of windows of `size` rows, which hold all wanted rows.

    Args:
        wanted: Neighbouring rows.
        rows: The number of rows of the batch.
        size: The number of rows of a window.
    """
    if len(wanted) <= size:
        return [min(wanted.start, rows - size)]
    last = wanted.stop - size
    return [*range(wanted.start, last, size), last]


def _features(batch: Any, rows: int, ignored: Collection[int]) -> "NDArray[np.int64] | None":
    """Return features of shape (rows, features); None if no tensor has rows.

    Each tensor gives the numbers of its zero, ignored and missing entries per row, and the size and sign of floating-point numbers. Labels,
    one integer per row, are features themselves.
    """
    columns: list[Tensor] = []
    for _, leaf in named_tensors(batch):
        if (
            not (leaf.dim() and leaf.shape[0] == rows and leaf.numel())
            or leaf.is_complex()
            or leaf.layout != torch.strided
        ):
            continue
        flat = leaf.detach().reshape(rows, -1)
        if flat.is_floating_point() and flat.element_size() == 1:
            flat = flat.float()  # few operators support 8-bit floating-point formats
        columns.append((flat == 0).sum(1))
        if leaf.is_floating_point():
            columns += [(~flat.isfinite()).sum(1), *size_and_sign_of(flat).unbind(1)]
        else:
            columns.append(ignored_in_rows(flat[None], ignored)[0])
            if flat.shape[1] == 1:
                columns.append(flat[:, 0].long())
    if len({column.device for column in columns}) > 1:
        columns = [column.cpu() for column in columns]
    return torch.stack(columns, 1).cpu().numpy() if columns else None


def _scores(column: "NDArray[np.int64]", starts: "NDArray[np.int64]", size: int) -> "NDArray[np.float64]":
    """Return a score for each start: the diversity of the `size` rows from there.

    The score is a sum over the distinct values of these rows. A value adds 1 plus the reciprocal of its count in the
    column, so a rare value adds up to 2.
    """
    _, codes, counts = np.unique(column, return_inverse=True, return_counts=True)
    order = np.argsort(codes, kind="stable")
    before = np.full(len(column), -1)  # the previous row with the same value; -1 without one
    before[order[1:]] = np.where(codes[order[1:]] == codes[order[:-1]], order[:-1], -1)
    rows = starts[:, None] + np.arange(size)
    is_first = before[rows] < starts[:, None]
    return ((1.0 + 1.0 / counts[codes])[rows] * is_first).sum(1)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The arguments of one check.

    Args:
        kwargs: The arguments of `training_step`, the batch first.
        rules: The loss rules that may hold.
        rows: The number of rows of the batch.
        unit: The number of rows that a split keeps together.
        micro_batch_size: The rows of the largest micro-batch.
        most: The largest number of units to run.
        number: The number of earlier checks. Consecutive checks split the rows differently.
        is_first: Whether no check was conclusive yet, or all were thin. The rows are then split in two ways, and also run with dropout.
        since: A sentence for a refusal: which batches were split before.
        micro_batches: The rows of each micro-batch in training; empty where unknown.
        differing: Neighbouring rows, some of which differ from others in a new way; none where unknown.
        ignored: Labels that losses ignore.
        least: The fewest units of a micro-batch.
        of_summands: The loss rules that may hold for each summand of the loss, where none does for all of it.
        own: The rows of the batch's own micro-batches, if these are to run, because the step fails on fewer rows.
        is_fine: Whether to split the rows into the smallest micro-batches, because some rows alone have a gradient that is not finite.
    """

    kwargs: "OrderedDict[str, Any]"
    rules: Sequence[LossRule]
    rows: int
    unit: int
    micro_batch_size: int
    most: int
    number: int
    is_first: bool
    since: str
    micro_batches: Sequence[int] = ()
    differing: range = range(0)
    ignored: Collection[int] = (IGNORED,)
    least: int = 1
    of_summands: Sequence[LossRule] = ()
    own: Sequence[int] = ()
    is_fine: bool = False

    @property
    def batch(self) -> Any:
        """The whole batch."""
        return next(iter(self.kwargs.values()))

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of each micro-batch in training."""
        return self.micro_batches or split_rows(
            self.rows, micro_batch_size=max(self.micro_batch_size, self.unit), unit=self.unit
        )

    def split(self, units: int, *, other: bool = False) -> list[int]:
        """Return the rows of each micro-batch for `units` units.

        Args:
            units: The number of units to split.
            other: Whether to return another split, if there is one.
        """
        if self.is_fine:
            return split_rows(units * self.unit, micro_batch_size=self.least * self.unit, unit=self.unit)
        splits = self.splits(units)
        return splits[(self.number + other) % len(splits)]

    def splits(self, units: int) -> list[list[int]]:
        """Return the splits of `units` units, with the rows of each micro-batch."""
        if sum(self.own) == units * self.unit:
            return [list(self.own)]
        return [[self.unit * one for one in sizes] for sizes in splits_of(units, least=self.least)]

    def starts(self, size: int) -> list[int]:
        """Return the first row of each window of `size` rows that is to run.

        It is one window, or as many as hold all differing rows.
        """
        if self.differing:
            return windows_over(self.differing, rows=self.rows, size=size)
        return [self.window(size)]

    def window(self, size: int) -> int:
        """Return the first of `size` neighbouring rows whose data differ most."""
        return window(self.batch, rows=self.rows, size=size, unit=self.unit, ignored=self.ignored)
