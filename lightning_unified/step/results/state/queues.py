"""Merge queues, to which a step adds entries for its rows while the oldest leave.

A memory bank holds the latest keys of a contrastive loss: `self.queue = torch.cat([self.queue, keys])[-size:]`. A micro-batch adds the keys of its
rows to the queue from before the batch. So the whole batch's queue is that one with the keys of all micro-batches. Checks learn at which end and
along which dimension entries are added, in which order, and how many for each row. In a split batch, each micro-batch's value must
then be the old entries, moved by that many, and new ones.

The number of entries that a queue holds is known of a deque with `maxlen`, and of tensors, arrays and lists whose length stays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.state.entries import refusal_of_merge
from lightning_unified.step.results.state.rings import (
    MOST_DIMENSIONS,
    MOST_PER_ROW,
    OneWrite,
    has_ring,
    is_array,
    learn_rings,
    wholes_of_ring,
)

__all__ = ["has_queue", "queue_of", "without_queues"]

_ENDS = ("last", "first")


@dataclass(frozen=True, slots=True)
class _Queue:
    """The values of a queue before and after the runs of a step.

    Args:
        before: The value from before the step.
        values: The value that each run leaves.
        rows: The number of rows of each run.
        limit: The largest number of entries of a deque; None for other values.
    """

    before: Any
    values: Sequence[Any]
    rows: Sequence[int]
    limit: int | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """The way in which a step adds entries.

    Args:
        end: The end at which it adds them, `"last"` or `"first"`.
        dim: The dimension along which entries lie.
        per_row: The number of entries for each row.
        is_reversed: Whether entries of later rows come first.
    """

    end: str
    dim: int
    per_row: int
    is_reversed: bool

    def added(self, before: Any, after: Any, rows: int, limit: int | None) -> Any:
        """Return the entries that `rows` rows have added to a queue; None if they have done anything else."""
        number, length = self.per_row * rows, _length(before, self.dim)
        most = length if limit is None else limit
        kept = min(length, max(most - number, 0))
        if _length(after, self.dim) != min(most, length + number):
            return None
        if self.end == "last":
            old, stays, new = _part(before, self.dim, length - kept, None), (0, kept), (kept, None)
        else:
            old, stays, new = _part(before, self.dim, 0, kept), (min(number, most), None), (0, min(number, most))
        return _part(after, self.dim, *new) if same(_part(after, self.dim, *stays), old) else None

    def whole(self, queue: _Queue) -> Any:
        """Return the queue with the entries of all runs; None if a run has done anything else."""
        pairs = zip(queue.values, queue.rows, strict=True)
        added = [self.added(queue.before, value, rows, queue.limit) for value, rows in pairs]
        if any(one is None for one in added):
            return None
        parts = added[::-1] if self.is_reversed else added
        most = _length(queue.before, self.dim) if queue.limit is None else queue.limit
        if self.end == "first":
            return _part(_joined([*parts, queue.before], self.dim), self.dim, 0, most)
        entries = _joined([queue.before, *parts], self.dim)
        return _part(entries, self.dim, max(_length(entries, self.dim) - most, 0), None)


def without_queues(
    table: MergeTable,
    troubles: Sequence[str],
    whole: Mapping[str, OneWrite],
    runs: Sequence[Mapping[str, OneWrite]],
    rows: Sequence[int],
    *,
    tolerance: float,
) -> list[str]:
    """Learn which values are queues; return `troubles` without them.

    Args:
        table: The rules, which hold each way to add entries that fits all checks.
        troubles: The paths of values that no other rule merges.
        whole: The writes of the whole batch, by path.
        runs: The writes of each micro-batch.
        rows: The rows of each micro-batch.
        tolerance: Largest relative difference that counts as rounding.
    """
    merged = learn_rings(table, troubles, whole, runs, rows, tolerance=tolerance)
    for path in {*whole, *(path for run in runs for path in run)}:
        if not (path in troubles or table.knows(_key(path))):
            continue
        queue, known = _queue_at(path, runs, rows), whole.get(path)
        after = queue.before if known is None else known.after
        fits = [rule for rule in _rules(table, path, queue.before) if _fits(rule, after, queue, tolerance)]
        table.note(_key(path), *map(_text, fits))
        merged |= {path} if fits else set()
    table.unmergeable -= {one for one in table.unmergeable for path in merged if f"{one}.".startswith(f"{path}.")}
    return [path for path in troubles if path not in merged]


def has_queue(table: MergeTable, path: str) -> bool:
    """Return whether the value at `path` was a queue, or the place in one, in all checks."""
    return bool(table.all_rules(_key(path))) or has_ring(table, path)


def queue_of(table: MergeTable, path: str, runs: Sequence[Mapping[str, OneWrite]], rows: Sequence[int]) -> Any:
    """Return the queue after all micro-batches, or the place in it.

    Raises:
        SplitError: If a micro-batch has not added entries for its rows only, or ways to add them that fit all checks differ.
    """
    queue = _queue_at(path, runs, rows)
    added = [rule.whole(queue) for rule in _rules(table, path, queue.before)] if table.all_rules(_key(path)) else []
    found = [one for one in (*added, *wholes_of_ring(table, path, runs, rows)) if one is not None]
    if not found or not all(same(one, found[0]) for one in found):
        raise refusal_of_merge(path)
    return found[0]


def _queue_at(path: str, runs: Sequence[Mapping[str, OneWrite]], rows: Sequence[int]) -> _Queue:
    known = next((run[path] for run in runs if path in run), None)
    if known is None:
        return _Queue(None, [], rows, None)
    return _Queue(known.before, [run[path].after if path in run else known.before for run in runs], rows, known.limit)


def _fits(rule: _Rule, whole: Any, queue: _Queue, tolerance: float) -> bool:
    merged = rule.whole(queue)
    is_added = rule.added(queue.before, whole, sum(queue.rows), queue.limit) is not None
    return is_added and merged is not None and same(merged, whole, tolerance=tolerance)


def _rules(table: MergeTable, path: str, before: Any) -> list[_Rule]:
    """Return the rules that fit all checks; every rule if no check has seen the value."""
    if table.knows(_key(path)):
        return [_Rule(*json.loads(rule)) for rule in sorted(table.all_rules(_key(path)))]
    dimensions = range(min(before.ndim, MOST_DIMENSIONS)) if is_array(before) else range(isinstance(before, list))
    ways = product(_ENDS, dimensions, range(1, MOST_PER_ROW + 1), (False, True))
    return [_Rule(*way) for way in ways]


def _text(rule: _Rule) -> str:
    return json.dumps([rule.end, rule.dim, rule.per_row, rule.is_reversed])


def _length(value: Any, dim: int) -> int:
    """Return the number of entries along a dimension; -1 if there is none."""
    if is_array(value):
        return value.shape[dim] if dim < value.ndim else -1
    return len(value) if isinstance(value, list) else -1


def _part(value: Any, dim: int, start: int, stop: int | None) -> Any:
    return value[(slice(None),) * dim + (slice(start, stop),)] if is_array(value) else value[start:stop]


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), dim)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(list(parts), dim)
    return [entry for part in parts for entry in part]


def _key(path: str) -> str:
    return f"{path} (queue)"
