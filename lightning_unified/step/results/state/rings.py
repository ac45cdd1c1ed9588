"""Merge rings: queues that a step writes at a place which it moves by the entries written.

A memory bank is often such a ring: `self.queue[place : place + n] = keys; self.place = (place + n) % size`. Each micro-batch writes its entries from the
place before the batch on. The whole batch writes those of all micro-batches one after another, and moves the place by all of them.

At the end of the ring, steps do one of these:

| end | the step |
|---|---|
| `"wrap"` | goes on at the beginning |
| `"cut"` | leaves out the other entries, and begins anew with the next batch |
| `"count"` | goes on at the beginning, and counts all entries so far in the place |
| `"fail"` | fails, and begins anew if a batch ends at the end |

Few rows seldom reach the end. So a check also runs its rows from places near the end (`probes_of`, `learn_probes`). A step that does anything else there,
such as setting a flag, has no ring that is merged. Before such runs, a batch that reaches the end is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_unified.step.results.merging import MergeTable
from lightning_unified.step.results.sameness import same

__all__ = [
    "MOST_DIMENSIONS",
    "MOST_PER_ROW",
    "OneWrite",
    "Probe",
    "has_ring",
    "is_array",
    "learn_probes",
    "learn_rings",
    "probes_of",
    "wholes_of_ring",
]

_ENDS = ("wrap", "cut", "count", "fail")
MOST_PER_ROW = 4  # entries; a step seldom keeps more than the views of a row
MOST_DIMENSIONS = 3
_MOST_PLACES = 8  # whole numbers that a step writes; more are data


class OneWrite(Protocol):
    """A value before and after a run."""

    @property
    def before(self) -> Any: ...
    @property
    def after(self) -> Any: ...
    @property
    def limit(self) -> int | None: ...


Writes = Mapping[str, OneWrite]


@dataclass(frozen=True, slots=True)
class Probe:
    """A place near the end of a ring from which rows are to be run.

    Args:
        path: The path of the place.
        place: The place.
        change: The number of entries by which the rows move it elsewhere.
    """

    path: str
    place: int
    change: int = 0

    def like(self, value: Any) -> Any:
        """Return the place as a value of the kind of `value`."""
        return torch.full_like(value, self.place) if isinstance(value, Tensor) else self.place


@dataclass(frozen=True, slots=True)
class _Rule:
    """The way in which a step writes entries.

    Args:
        dim: The dimension along which entries lie.
        per_row: The number of entries for each row.
        place: The path of the place.
        end: What the step does at the end, one of `_ENDS`.
    """

    dim: int
    per_row: int
    place: str
    end: str

    def moves(self, place: int, number: int, size: int) -> tuple[list[slice], int] | None:
        """Return where `number` entries are written from `place` on, and the place after; None if they are not."""
        first = place % size if self.end == "count" else place
        stop = first + number
        if number > size or not 0 <= first < size or (self.end == "fail" and stop > size):
            return None
        after = {"wrap": stop % size, "count": place + number}.get(self.end, stop if stop < size else 0)
        if stop <= size or self.end == "cut":
            return [slice(first, min(stop, size))], after
        return [slice(first, size), slice(0, stop - size)], after

    def added(self, before: Any, after: Any, place: int, moved: Any, rows: int) -> Any:
        """Return the entries that `rows` rows have written from `place` on; None if they have done anything else."""
        moves = self.moves(place, self.per_row * rows, before.shape[self.dim])
        if moves is None or _number(moved) != moves[1] or getattr(after, "shape", None) != before.shape:
            return None
        parts = [after[self._index(one)] for one in moves[0]]
        if not same(self._with(before, moves[0], parts), after):
            return None
        return torch.cat(parts, self.dim) if isinstance(after, Tensor) else np.concatenate(parts, self.dim)

    def whole(self, path: str, runs: Sequence[Writes], rows: Sequence[int], *, to_end: bool) -> tuple[Any, int] | None:
        """Return the ring and the place after all runs; None if a run has done anything else.

        None also where they reach the end of the ring, unless `to_end`.
        """
        before = next((run[path].before for run in runs if path in run), None)
        if before is None or not all(self.place in run for run in runs):
            return None
        place = _number(runs[0][self.place].before)
        moves = None if place is None else self.moves(place, self.per_row * sum(rows), before.shape[self.dim])
        if moves is None or place is None or (not to_end and moves[0][0].stop == before.shape[self.dim]):
            return None
        rings = [run[path].after if path in run else before for run in runs]  # by chance a run may write what is there
        parts = [
            self.added(before, ring, place, run[self.place].after, one)
            for ring, run, one in zip(rings, runs, rows, strict=True)
        ]
        if any(part is None for part in parts):
            return None
        entries = torch.cat(parts, self.dim) if isinstance(before, Tensor) else np.concatenate(parts, self.dim)
        starts = [sum(one.stop - one.start for one in moves[0][:index]) for index in range(len(moves[0]))]
        spans = [slice(start, start + one.stop - one.start) for start, one in zip(starts, moves[0], strict=True)]
        return self._with(before, moves[0], [entries[self._index(one)] for one in spans]), moves[1]

    def _with(self, before: Any, places: Sequence[slice], parts: Sequence[Any]) -> Any:
        ring = before.detach().clone() if isinstance(before, Tensor) else before.copy()
        for place, part in zip(places, parts, strict=True):
            ring[self._index(place)] = part
        return ring

    def _index(self, place: slice) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, place)


def learn_rings(
    table: MergeTable,
    troubles: Sequence[str],
    whole: Writes,
    runs: Sequence[Writes],
    rows: Sequence[int],
    *,
    tolerance: float,
) -> set[str]:
    """Learn which values are rings; return their paths, and those of the places in them.

    The arguments are those of `without_queues`.
    """
    found: set[str] = set()
    for path in whole:
        if path in troubles or table.knows(_key(path)):
            rules = [one for one in _rules(table, path, whole) if _fits(one, path, whole, runs, rows, tolerance)]
            _note(table, path, rules)
            found |= {path, *(rule.place for rule in rules)} if rules else set()
    return found


def has_ring(table: MergeTable, path: str) -> bool:
    """Return whether the value at `path` was a ring, or the place in one, in all checks."""
    return bool(table.all_rules(_key(path)) or table.all_rules(_place_key(path)))


def wholes_of_ring(table: MergeTable, path: str, runs: Sequence[Writes], rows: Sequence[int]) -> Iterator[Any]:
    """Yield what each rule that fits all checks gives for the ring or the place at `path`.

    That is None where the rule does not hold.
    """
    for rule in _known(table, path):
        whole = rule.whole(path, runs, rows, to_end=table.knows(_end_key(path)))
        yield None if whole is None else whole[0]
    for ring in table.all_rules(_place_key(path)):
        for rule in _known(table, ring):
            is_own = rule.place == path
            whole = rule.whole(ring, runs, rows, to_end=table.knows(_end_key(ring))) if is_own else None
            yield None if whole is None else Probe(path, whole[1]).like(runs[0][path].before)


def probes_of(table: MergeTable, written: Writes, rows: int) -> list[Probe]:
    """Return the places from which `rows` rows show what a step does at the end of its rings."""
    found: dict[Probe, None] = {}
    for path in written:
        if not table.knows(_end_key(path)):
            for rule in _known(table, path):
                size, number = written[path].before.shape[rule.dim], rule.per_row * rows
                if number < size:
                    places = (size - number - 1, size - number, size - number // 2 - 1)
                    found.update(dict.fromkeys(Probe(rule.place, place, number) for place in places))
    return list(found)


def learn_probes(table: MergeTable, runs: Sequence[tuple[Probe, Writes | None]], whole: Writes, rows: int) -> list[str]:
    """Learn from runs that began near the end of rings; return the paths that no rule merges any more.

    These are rings of which no rule is left, and other counts that the step treats in another way there (`min(self.count + n, size)`).

    Args:
        table: The rules.
        runs: Each probe, and the writes of its run; None if the step failed.
        whole: The writes of the same rows from the place where they are.
        rows: The number of rows of all these runs.
    """
    rings = [path for path in whole if _known(table, path)]
    for path in rings:
        rules = [
            rule
            for rule in _known(table, path)
            if all(_stands(rule, path, one, run, whole, rows) for one, run in runs if one.path == rule.place)
        ]
        _note(table, path, rules)
        if runs:
            table.note(_end_key(path), "known")
    lost = [path for path in rings if not _known(table, path)]
    counts = [(one, run) for one, run in runs if not table.all_rules(_place_key(one.path))]
    return [*lost, *dict.fromkeys(one.path for one, run in counts if not _counts_on(one, run, whole))]


def _stands(rule: _Rule, path: str, probe: Probe, probed: Writes | None, whole: Writes, rows: int) -> bool:
    """Return whether a rule holds in the run of a probe."""
    if probed is None:
        return (
            rule.end == "fail"
            and rule.moves(probe.place, rule.per_row * rows, whole[path].before.shape[rule.dim]) is None
        )
    before = whole[path].before
    if {*probed, path} != {*whole} or rule.place not in probed:
        return False
    after = probed[path].after if path in probed else before
    return rule.added(before, after, probe.place, probed[rule.place].after, rows) is not None


def _counts_on(probe: Probe, probed: Writes | None, whole: Writes) -> bool:
    if probed is None or probed.keys() != whole.keys():
        return False
    return _number(probed[probe.path].after) == probe.place + probe.change


def _fits(rule: _Rule, path: str, whole: Writes, runs: Sequence[Writes], rows: Sequence[int], tolerance: float) -> bool:
    merged, after = rule.whole(path, runs, rows, to_end=True), whole[path].after
    if merged is None or rule.place not in whole or _number(whole[rule.place].after) != merged[1]:
        return False
    return same(merged[0], after, tolerance=tolerance)


def _rules(table: MergeTable, path: str, whole: Writes) -> list[_Rule]:
    """Return the rules that fit all checks; every rule if no check has seen the value."""
    if table.knows(_key(path)):
        return _known(table, path)
    before = whole[path].before
    dimensions = range(min(before.ndim, MOST_DIMENSIONS) if is_array(before) else 0)
    places = [one for one in whole if one != path and _number(whole[one].before) is not None]
    ways = product(dimensions, range(1, MOST_PER_ROW + 1), places if len(places) <= _MOST_PLACES else (), _ENDS)
    return [_Rule(*way) for way in ways]


def _known(table: MergeTable, path: str) -> list[_Rule]:
    return [_Rule(*json.loads(rule)) for rule in sorted(table.all_rules(_key(path)))]


def _note(table: MergeTable, path: str, rules: Sequence[_Rule]) -> None:
    """Record the rules that are left for a ring."""
    places = {rule.place for rule in (*_known(table, path), *rules)}
    table.note(_key(path), *(json.dumps([one.dim, one.per_row, one.place, one.end]) for one in rules))
    for place in places:
        others = table.all_rules(_place_key(place)) - {path}
        table.note(_place_key(place), *others, *([path] if any(one.place == place for one in rules) else []))


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a strided tensor, whose entries lie along dimensions."""
    return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.layout is torch.strided)


def _number(value: Any) -> int | None:
    """Return a whole number, also of a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in (torch.int64, torch.int32):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _key(path: str) -> str:
    return f"{path} (ring)"


def _end_key(path: str) -> str:
    return f"{path} (end of ring)"


def _place_key(path: str) -> str:
    return f"{path} (place)"
