"""Merge the state that micro-batches write into their module.

A step may write more than gradients: running statistics, a momentum teacher, a counter, a list of outputs. Each micro-batch of a
split batch would write it once more. So every micro-batch begins with the state from before the batch. The values that they write
are merged by a rule that the exactness check has found:

| the whole batch writes | for example | rule |
|---|---|---|
| the value that each micro-batch writes | a teacher moved towards the weights, `self.calls += 1`, spectral norm | `"equal"`: once a batch |
| the mean of the micro-batches' values | running statistics of InstanceNorm, a moving average of the loss | `"mean"`, `"mean of rows"` |
| the sum of the micro-batches' changes | `self.seen += len(batch)`, `self.labels.update(y)` of a Counter | `"sum"` of changes |
| an entry that only one micro-batch writes | `self.losses[sample] = loss` | as written |
| the members that micro-batches add to a set | `self.seen.update(samples)` | the union |
| a dict or set that the step creates | `self.cache = {}` | entry by entry |
| an object that the step makes | `self.posterior = Normal(mean, scale)` | attribute by attribute |
| the quotient of two numbers beside it | `self.average = self.sum / self.count` | the quotient of the merged numbers |
| the entries that micro-batches add to a queue | `self.queue = torch.cat([self.queue, keys])[-size:]` | `state.queues` |
| the merged tails that micro-batches append | `self.outputs.append(loss)` | a rule for each entry |

Where no rule fits, the batch cannot be split exactly. Two kinds of writes stay as the micro-batches leave them. One is the
state of the module's own random generators, which advance with every draw. The other is a value that two equal runs write
differently, such as a time; in a container or an object, the last micro-batch's stays.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.results.kept_gradients import awaits_gradient, copy_gradients, gradients_of
from lightning_unified.step.results.merging import LAST, MergeTable, MicroBatchWeights
from lightning_unified.step.results.objects import layers_of
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.state.entries import (
    UNWRITTEN,
    is_known,
    is_mergeable,
    learn_entry,
    merge_entry,
    refusal_of_layers,
    refusal_of_merge,
)
from lightning_unified.step.results.state.queues import has_queue, queue_of, without_queues
from lightning_unified.step.results.state.quotients import has_quotient, numbers_of, quotient_of, without_quotients
from lightning_unified.step.results.state.writes import Written, note_backward, refusal_of_backward, written_in_backward
from lightning_unified.step.split.containers import tensors_in
from lightning_unified.step.undo import Noted, StateWatch
from lightning_unified.step.undo.changes import ABSENT, Change, moved_since, versions_of

__all__ = ["WrittenOverMicroBatches", "learn_written"]


def learn_written(
    table: MergeTable, whole: Written, runs: Sequence[Written], weights: MicroBatchWeights, *, tolerance: float
) -> list[str]:
    """Learn how the writes of micro-batches merge; return the paths at which no rule fits."""
    troubles = []
    for path in dict.fromkeys([*whole, *(path for run in runs for path in run)]):
        writes = [one.get(path) for one in (whole, *runs)]
        if any(one is not None and one.in_backward for one in writes):
            note_backward(table, path)
        known = next(one for one in writes if one is not None)
        after, *values = [known.before if one is None else one.after for one in writes]
        if known.kind == "members":
            if after != set().union(known.before, *values):
                troubles.append(path)
        elif known.kind == "state":
            table.learn(path, values, after, weights, tolerance=0.0)
            table.unmergeable.discard(path)
        else:
            after, *values = [UNWRITTEN if one is None else one.after for one in writes]
            troubles += learn_entry(table, path, known.before, after, values, weights, tolerance=tolerance)
    troubles = without_queues(table, troubles, whole, runs, weights.rows, tolerance=tolerance)
    return without_quotients(table, troubles, [whole, *runs])


class WrittenOverMicroBatches:
    """Starts every micro-batch from the state before the batch, and merges the writes.

    Args:
        watch: Records the state that the step may write; used for nothing else.
        table: The rules, by path.
        learn: `learn(table, paths, decides)` checks the batch if its step wrote at `paths` and checks so far do not tell how that merges;
            `decides(path)` returns whether they do.
        ignored: Prefixes of paths to leave alone.
    """

    def __init__(
        self,
        watch: StateWatch,
        table: MergeTable,
        learn: Callable[[MergeTable, Sequence[str], Callable[[str], bool]], None],
        *,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._watch, self._table, self._learn, self._ignored = watch, table, learn, ignored
        self._noted: Noted | None = None
        self._versions: list[int] = []
        self._writes: list[dict[str, Change]] = []
        self._after: list[dict[str, Change]] = []  # the same, after each backward pass
        self._resumed: dict[str, Any] = {}  # merged values that the last backward pass is yet to write
        self._late: dict[str, Any] = {}  # merged values of which the last backward pass is yet to write gradients

    def begin_micro_batch(self) -> None:
        """Restore the state from before the batch for the next micro-batch."""
        if self._noted is None:
            self._noted = self._watch.note()
            self._versions = versions_of(self._noted)
        else:
            last = self._after if len(self._after) == len(self._writes) else self._writes
            self._back(last[-1].values())
            self._noted.rewind_iterators()

    def end_micro_batch(self) -> None:
        """Record the writes of the micro-batch."""
        self._writes.append({one.path: one for one in self._moved() if not one.path.startswith(self._ignored)})

    def begin_backward(self) -> None:
        """Restore the state that the micro-batch's own step left, if hooks have got merged state since.

        Raises:
            SplitError: If these hooks wrote such state.
        """
        now = self._values() if self._resumed else {}
        for path, value in self._resumed.items():
            if not same(now.get(path, self._change(path, self._after).before), value):
                raise refusal_of_backward(path)
            if (own := self._writes[-1].get(path)) is not None:
                own.put(own.after)

    def end_backward(self) -> None:
        """Record the micro-batch's writes after its backward pass, where checks have seen such writes."""
        if self._noted is None:  # all state has been merged
            return
        paths = written_in_backward(self._table)
        moved = self._moved() if paths else ()
        now = {one.path: one for one in moved if one.path in paths and not one.path.startswith(self._ignored)}
        self._after.append({path: one for path, one in self._writes[-1].items() if path not in paths} | now)

    def _take_backward(self) -> None:
        """Go on with the writes after the backward passes, once the last one is over."""
        if len(self._after) == len(self._writes):
            self._writes = self._after

    def keeping(self) -> list[Tensor]:
        """Return the tensors that the last micro-batch has written and that await a gradient."""
        last = self._writes[-1].values() if self._writes else ()
        return [one for change in last for one in tensors_in(change.after) if awaits_gradient(one)]

    def _moved(self) -> Iterable[Change]:
        """Return the changes since the batch began."""
        assert self._noted is not None, "a micro-batch has begun"
        known = self._table.paths if len(self._writes) == 0 else set(self._writes[0])
        return moved_since(self._noted, self._versions, known)

    def _values(self) -> dict[str, Any]:
        """Return the values that are there now by path, of which hooks may have written some since the step."""
        return {one.path: one.after for one in self._moved()}

    def _back(self, changes: Iterable[Change]) -> None:
        """Take back the writes that a rule merges; the others stay.

        Where no check has seen a write, the batch is checked first. Writes of hooks that run once a micro-batch stay too: no check sees them.
        """
        changes = list(changes)
        new = [one for one in changes if self._is_new(one)]
        back = changes if new else [one for one in changes if self._merges(one)]
        now = self._values() if new else {}
        for one in back:
            _put_back(one)
        if new or len(self._writes) == 1:
            self._learn(self._table, [one.path for one in new], self._table.knows)
        for one in back:
            if not self._merges(one):
                one.put(now.get(one.path, one.after))

    def numbers(self) -> dict[str, list[Any]]:
        """Return the floating-point numbers that all micro-batches have written, by path."""
        self._take_backward()
        first, *others = self._writes or [{}]
        shared = [path for path in first if all(path in one for one in others) and self._table.all_rules(path)]
        found = {path: [_without_graph(writes[path].after) for writes in self._writes] for path in shared}
        return {path: values for path, values in found.items() if all(map(_has_fraction, values))}

    @contextmanager
    def state_before(self) -> Iterator[None]:
        """Take back the writes of the last micro-batch inside the block."""
        self._take_backward()
        last = self._writes[-1].values() if self._writes else ()
        changes = [one for one in last if self._merges(one) or self._is_new(one)]
        now = self._values() if any(map(self._is_new, changes)) else {}
        for one in changes:
            _put_back(one)
        yield
        for one in changes:
            one.put(one.after if self._merges(one) else now.get(one.path, one.after))

    def _merges(self, change: Change) -> bool:
        """Return whether some rule merges this change."""
        path = change.path
        is_known = has_quotient(self._table, path) or has_queue(self._table, path)
        return change.kind == "members" or is_known or is_mergeable(self._table, path)

    def _is_new(self, change: Change) -> bool:
        """Return whether no check has seen such a write."""
        return not (change.kind == "members" or is_known(self._table, change.path, change.before))

    def finish(self, weights: MicroBatchWeights) -> None:
        """Write the whole batch's values.

        The batch is checked first where micro-batches wrote different values although checked batches had equal ones, such as a count that was
        always 0, and where another than the first micro-batch wrote something new.

        Raises:
            SplitError: If no rule merges the values after that check, or each micro-batch has made layers of its own.
        """
        self._take_backward()
        self._require_one_layer()
        whole = {path: self._merged(path, weights) for path in self._paths}
        written = {path: self._change(path) for writes in self._writes for path in writes}
        new = [path for path, change in written.items() if self._is_new(change)]
        failing = [*new, *(path for path, value in whole.items() if isinstance(value, SplitError))]
        with self.state_before() if failing else nullcontext():
            self._learn(self._table, failing, self._table.knows)
        for path in failing:
            merges = path not in new or self._merges(written[path])
            whole[path] = self._merged(path, weights) if merges else self._last_written(path)
        there = {path: self._put(path, value) for path, value in whole.items()}
        self._order(there)
        self._late = {path: value for path, value in there.items() if awaits_gradient(self._last_written(path))}
        self._resumed = {path: there.get(path, one.before) for path, one in self._awaiting_backward().items()}
        if not self._resumed:
            self._release()

    def _require_one_layer(self) -> None:
        """Raise `SplitError` if several micro-batches made a layer at one place, each with its own weights."""
        for path in dict.fromkeys(path for writes in self._writes for path in writes):
            made = [layers_of(writes[path].after) for writes in self._writes if path in writes]
            if len({tuple(map(id, layers)) for layers in made}) > 1:
                raise refusal_of_layers(path)

    def _release(self) -> None:
        """End the batch, except for gradients that the last backward pass is yet to write."""
        if self._noted is not None:
            self._watch.learn(self._noted)
            self._watch.release()
        self._noted, self._writes, self._after = None, self._writes if self._late else [], []

    def _awaiting_backward(self) -> dict[str, Change]:
        """Return the changes of earlier backward passes if the last one is yet to come, after hooks."""
        if len(self._after) == len(self._writes):
            return {}
        written = written_in_backward(self._table)
        changes = {path: one for writes in self._after for path, one in writes.items() if path in written}
        return {path: one for path, one in changes.items() if self._merges(one) and self._table.rule(path) != LAST}

    def _put(self, path: str, value: Any) -> Any:
        """Write the whole batch's value at a path, and return the value that is there then."""
        if isinstance(value, SplitError):
            raise value
        change, last = self._change(path), self._writes[-1].get(path)
        # an equal value is already there, and a graph may still need it unchanged
        is_there = last is not None and same(value, last.after, tolerance=0.0) and not gradients_of([value])
        if last is not None and change.kind != "members" and is_there:
            return last.after
        change.put(value)
        return value

    def _order(self, there: dict[str, Any]) -> None:
        """Put new entries into the order in which the micro-batches added them: the last one's came first."""
        changes = [self._change(path) for path in there]
        added = [one for one in changes if one.kind == "entry" and one.before is ABSENT]
        if all(one.path in self._writes[-1] for one in added):
            return
        for one in added:
            one.put(ABSENT)
            one.put(there[one.path])

    def finish_gradients(self, weights: MicroBatchWeights) -> None:
        """Add state and gradients that a backward pass has written since `finish`."""
        if resumed := list(self._resumed):
            self._resumed = {}
            self._take_backward()
            for path in resumed:
                self._put(path, self._merged(path, weights))
            self._release()
        for path, value in self._late.items():
            again = self._merged(path, weights)
            if not isinstance(again, SplitError):
                copy_gradients(again, value)
        self._late, self._writes = {}, []

    @property
    def _paths(self) -> list[str]:
        """The paths of all writes that some rule merges."""
        paths = dict.fromkeys(path for writes in self._writes for path in writes)
        return [path for path in paths if self._merges(self._change(path))]

    def _change(self, path: str, several: Sequence[dict[str, Change]] = ()) -> Change:
        """Return the first micro-batch's change at a path."""
        return next(writes[path] for writes in several or self._writes if path in writes)

    def _last_written(self, path: str) -> Any:
        """Return the last value that a micro-batch wrote at a path."""
        return next(writes[path].after for writes in reversed(self._writes) if path in writes)

    def _merged(self, path: str, weights: MicroBatchWeights) -> Any:
        """Return the whole batch's value at a path; a `SplitError` if the rules do not apply."""
        try:
            if not has_quotient(self._table, path):
                return self._by_rule(path, weights)
            # the two numbers by rules of their own: in the first batch, each number of a meter may be a quotient of others
            merged = partial(self._by_rule, weights=weights)
            quotient = quotient_of(self._table, path, numbers_of(self._writes), merged, self._change(path).after)
            value = self._by_rule(path, weights) if is_mergeable(self._table, path) else quotient
            return value if same(value, quotient, tolerance=1e-5) else refusal_of_merge(path)
        except SplitError as refusal:
            return refusal

    def _by_rule(self, path: str, weights: MicroBatchWeights) -> Any:
        known, changes = self._change(path), [writes.get(path) for writes in self._writes]
        if known.kind == "members":
            return set().union(known.before, *(one.after for one in changes if one is not None))
        if has_queue(self._table, path):
            return queue_of(self._table, path, self._writes, weights.rows)
        values = [UNWRITTEN if one is None else one.after for one in changes]
        return merge_entry(self._table, path, known.before, values, weights)


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _has_fraction(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    return is_number or isinstance(value, float)


def _put_back(change: Change) -> None:
    if change.before is None and change.kind == "tensor":
        raise SplitError(
            f"the step writes {change.path} in place, which is too large to be copied for each micro-batch; write it in on_train_batch_end or "
            "on_validation_batch_end, or declare MicroBatchRules(splittable=False)."
        )
    change.put(change.before)
