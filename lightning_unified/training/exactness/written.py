"""What a step writes into its module, and how the writes of micro-batches become the whole batch's.

A step may write more than gradients: running statistics, a momentum teacher, a counter, a list of outputs. Each micro-batch of a split batch
would write it once more. So every micro-batch begins with the state from before the batch, and what they write is put together by a
rule that the exactness check has found, as outputs are:

| the whole batch writes | for example | rule |
|---|---|---|
| what each micro-batch writes | a teacher moved towards the weights, `self.calls += 1`, spectral norm | `"equal"`: once a batch |
| the mean of what micro-batches write | running statistics of InstanceNorm, a moving average of the loss | `"mean"`, `"mean of rows"` |
| the sum of what micro-batches add | `self.seen += len(batch)` | `"sum"` of changes |
| an entry that one micro-batch writes, others not | `self.losses[sample] = loss` | as written |
| what micro-batches add to a set | `self.seen.update(samples)` | all of it |
| what micro-batches append, merged | `self.outputs.append(loss)` | a rule for each entry |

Where nothing fits, the batch cannot be split exactly. Two kinds of writes are left as they come: states of random generators of the
module's own, which advance with every draw, and values that two equal runs write differently, such as times.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.training.exactness.merging import MergeTable, Parts, merged, same
from lightning_unified.training.exactness.trees import learn_tree, merge_tree
from lightning_unified.training.undo import Noted, StateWatch
from lightning_unified.training.undo.changes import (
    Change,
    changes_since,
    moved_since,
    versions_of,
)

__all__ = ["Write", "Written", "WrittenOverParts", "differing", "learn_written", "written_since"]


_AS_WRITTEN = "as written"  # by the one micro-batch that writes it


@dataclass(frozen=True, slots=True)
class Write:
    """What was there before a run, and what it wrote.

    Args:
        kind: As of `Change`.
        before: The value before; of tails nothing.
        after: The value after.
    """

    kind: str
    before: Any
    after: Any


Written = dict[str, Write]


def written_since(noted: Noted) -> Written:
    """Return what has been written since `noted`, by path."""
    return {one.path: Write(one.kind, one.before, _kept(one.after)) for one in changes_since(noted)}


def learn_written(
    table: MergeTable, whole: Written, runs: Sequence[Written], parts: Parts, *, tolerance: float
) -> list[str]:
    """Learn how the writes of parts become the whole's; return the paths at which nothing puts them together."""
    troubles = []
    for path in dict.fromkeys([*whole, *(path for run in runs for path in run)]):
        writes = [one.get(path) for one in (whole, *runs)]
        known = next(one for one in writes if one is not None)
        after, *values = [known.before if one is None else one.after for one in writes]
        writers = [one.after for one in writes[1:] if one is not None]
        if known.kind == "members":
            if after != set().union(known.before, *values):
                troubles.append(path)
            continue
        is_one_of = writes[0] is not None and 0 < len(writers) < len(runs)
        if is_one_of and all(same(one, after, tolerance=tolerance) for one in writers):
            table.note(_family(path), _AS_WRITTEN)
            continue
        if known.kind == "state":
            table.learn(path, values, after, parts, tolerance=0.0)
            table.unmergeable.discard(path)
            continue
        unmergeable = set(table.unmergeable)
        learn_tree(table, values, after, parts, tolerance=tolerance, path=path)
        new = table.unmergeable - unmergeable
        changes = [_change(known.before, value) for value in (after, *values)]
        # learnt beside other rules, which may fit because of zeros before
        if not any(change is None for change in changes):
            table.learn(_added(path), changes[1:], changes[0], parts, tolerance=tolerance)
            table.unmergeable.discard(_added(path))
            if "sum" in table.all_rules(_added(path)):
                table.unmergeable -= new
                continue
        if new:
            troubles.append(path)
    return troubles


def differing(one: Written, other: Written) -> set[str]:
    """Return the paths at which two equal runs wrote differently: times, addresses, names made anew."""
    table, paths = MergeTable(), set()
    for path in {*one, *other}:
        if path not in one or path not in other:
            paths.add(path)
            continue
        learn_tree(table, [other[path].after], one[path].after, Parts([1], [1.0]), tolerance=0.0, path=path)
        if table.unmergeable:
            paths.add(path)
            table.unmergeable.clear()
    return paths


def _family(path: str) -> str:
    """Return one path for all entries of a dict: of a dict by sample, each batch writes other ones."""
    return f"{path.rsplit('[', 1)[0]}[*]" if path.endswith("]") else path


def _added(path: str) -> str:
    return f"{path} (change)"


def _change(before: Any, after: Any) -> Any:
    """Return the difference of two numbers, arrays or tensors of one shape; None of anything else, and where it is not finite."""
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (before, after))
    tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    arrays = (
        isinstance(before, np.ndarray) and before.dtype.kind in "iufc" and getattr(after, "shape", None) == before.shape
    )
    if numbers or arrays or (tensors and before.shape == after.shape and before.dtype not in (torch.bool, torch.uint8)):
        change = after - before
        finite = torch.isfinite(change).all() if isinstance(change, Tensor) else np.isfinite(change).all()
        return change if finite else None
    return None


def _kept(value: Any) -> Any:
    """Return what is kept of a value written: tensors without their graphs."""
    return value.detach() if isinstance(value, Tensor) else value


class WrittenOverParts:
    """Lets every micro-batch begin with the state from before the batch, and puts together what they write.

    Args:
        watch: Over the state that the step may write; used for nothing else.
        table: The rules, by path.
        learn: `learn(table, paths)` has the batch checked, because its step wrote at paths that no check has seen.
        ignored: Where paths begin that are left alone.
    """

    def __init__(
        self,
        watch: StateWatch,
        table: MergeTable,
        learn: Callable[[MergeTable, Sequence[str]], None],
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._watch, self._table, self._learn, self._ignored = watch, table, learn, ignored
        self._noted: Noted | None = None
        self._versions: list[int] = []
        self._writes: list[dict[str, Change]] = []

    def begin_part(self) -> None:
        """Let a micro-batch begin with the state from before the batch."""
        if self._noted is None:
            self._noted = self._watch.note()
            self._versions = versions_of(self._noted)
        elif self._writes[-1]:
            self._back(self._writes[-1].values())

    def end_part(self) -> None:
        """Note what the micro-batch has written."""
        assert self._noted is not None, "a micro-batch has begun"
        known = self._table.paths if len(self._writes) == 0 else set(self._writes[0])
        moved = moved_since(self._noted, self._versions, known)
        self._writes.append({one.path: one for one in moved if not one.path.startswith(self._ignored)})

    def _back(self, changes: Iterable[Change]) -> None:
        """Take back the writes of the micro-batch before, which are put together at the end; those that nothing puts together stay."""
        changes = list(changes)
        new = [one for one in changes if not self._knows(one)]
        if new and len(self._writes) == 1:
            for one in changes:
                _put_back(one)
            self._learn(self._table, [one.path for one in new])
            for one in changes:
                if not self._merges(one):
                    one.put(one.after)
            return
        for one in changes:
            if self._merges(one):
                _put_back(one)

    def _knows(self, change: Change) -> bool:
        if change.kind == "members" or self._table.knows(_family(change.path)):
            return True
        return any(path == change.path or path.startswith(f"{change.path}.") for path in self._table.paths)

    def _merges(self, change: Change) -> bool:
        """Return whether some rule puts together what is written there."""
        path = change.path
        if change.kind == "members" or self._table.rule(_family(path)) == _AS_WRITTEN:
            return True
        added = "sum" in self._table.all_rules(_added(path))
        return added or any(
            self._table.rule(one) is not None for one in self._table.paths if one == path or one.startswith(f"{path}.")
        )

    def finish(self, parts: Parts) -> None:
        """Write what the whole batch would have written.

        Raises:
            SplitError: If micro-batches wrote differently what they had always written alike.
        """
        for path in dict.fromkeys(path for writes in self._writes for path in writes):
            changes = [writes.get(path) for writes in self._writes]
            known = next(one for one in changes if one is not None)
            if not self._merges(known):
                continue
            if known.kind == "members":
                known.put(set().union(known.before, *(one.after for one in changes if one is not None)))
            elif self._table.rule(_family(path)) == _AS_WRITTEN and None in changes:
                known.put(merged("equal", [one.after for one in changes if one is not None], parts))
            else:
                values = [known.before if one is None else one.after for one in changes]
                value = self._merged(path, known, values, parts)
                if not same(value, values[-1], tolerance=0.0):  # else it is there, and a graph may need it as it is
                    known.put(value)
        if self._noted is not None:
            self._watch.learn(self._noted)
            self._watch.release()
        self._noted, self._writes = None, []

    def _merged(self, path: str, known: Change, values: list[Any], parts: Parts) -> Any:
        def fallback(at: str, _values: Sequence[Any]) -> Any:
            raise SplitError(
                f"the step writes {at}, and what micro-batches write is no longer put together as in the batches checked; write it once a "
                "batch, in on_train_batch_end, or declare MicroBatchRules(splittable=False)."
            )

        changes = [_change(known.before, value) for value in values]
        adds = "sum" in self._table.all_rules(_added(path)) and not any(change is None for change in changes)
        if adds and self._table.rule(path) != "equal":
            return known.before + sum(changes)
        return merge_tree(self._table, values, parts, fallback=fallback, path=path)


def _put_back(change: Change) -> None:
    if change.before is None and change.kind == "tensor":
        raise SplitError(
            f"the step writes {change.path} in place, which is too large to be copied for each micro-batch; write it in on_train_batch_end, "
            "or declare MicroBatchRules(splittable=False)."
        )
    change.put(change.before)
