"""Merge attributes and container entries that micro-batches write.

A value is merged by a rule for outputs, or in one of these ways, by path:

| key in the table | rule |
|---|---|
| `path` | a rule for the values |
| `path (made)` | `"by entry"`: dicts or sets that micro-batches create are merged entry by entry |
| `path (change)` | `"sum"`: the changes of micro-batches are added up; a missing value counts as 0 |
| `path (last)` | `"as written"`: the last write of each entry of a tensor counts (`state.last_writes`) |
| `path (alone)` | `"as written"`: the value of the one micro-batch that writes it |

Entries of one dict share the last two keys, as `path[*] (…)`: a dict by sample or label has other entries in each batch.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights, merged
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.state.differences import are_whole_numbers, difference, is_number
from lightning_unified.step.results.state.last_writes import keeps_last_writes, last_writes, learn_last_writes
from lightning_unified.step.results.trees import learn_tree, merge_tree
from lightning_unified.step.undo.changes import ABSENT

__all__ = [
    "UNWRITTEN",
    "is_known",
    "is_mergeable",
    "learn_entry",
    "merge_entry",
    "note_alone",
    "refusal_of_layers",
    "refusal_of_merge",
]

UNWRITTEN = object()  # stands for a value that a run did not write
_ALONE = "as written"


def learn_entry(
    table: MergeTable,
    path: str,
    before: Any,
    whole: Any,
    values: Sequence[Any],
    weights: MicroBatchWeights,
    *,
    tolerance: float,
) -> list[str]:
    """Learn how values written at `path` merge; return the paths at which no rule fits.

    Args:
        table: The rules.
        path: The place of the values.
        before: The value from before the step; `ABSENT` where there was none.
        whole: The value that the whole batch wrote; `UNWRITTEN` if none.
        values: The value that each micro-batch wrote, or `UNWRITTEN`.
        weights: The rows and loss terms of the micro-batches.
        tolerance: Largest relative difference that counts as rounding.
    """
    if before is ABSENT and (kind := _made_kind([whole, *values])):
        return _learn_made(table, path, kind, [whole, *values], weights, tolerance=tolerance)
    before = _or_empty_list(before, [whole, *values])
    adds = _learn_change(table, path, before, whole, values, weights, tolerance=tolerance)
    learn_last_writes(table, path, before, _filled([whole], before)[0], _filled(values, before), tolerance=tolerance)
    written = _written(values)
    is_partial = whole is not UNWRITTEN and 0 < len(written) < len(values)
    is_alone = is_partial and all(same(one, whole, tolerance=tolerance) for one in written)
    if is_alone and not table.knows(_alone(path)):
        note_alone(table, path)
    if before is ABSENT and len(written) < len(values):
        lacks = True
    else:
        filled = _filled([whole, *values], before)
        lacks = _learn_values(table, path, filled, weights, tolerance=tolerance)
        if _is_step_of_two(before, filled[1:]):
            adds = adds and not _steps_add_up_by_chance(table, path, before, filled[1])
            lacks = table.drop(path, {"max", "min"}) or lacks
    # some micro-batches wrote, and a value differs from the whole's
    if is_partial and not is_alone and (adds or not lacks):
        table.reject(_alone(path))
        table.unmergeable.discard(_alone(path))
    if adds or keeps_last_writes(table, path) or (is_alone and table.rule(_alone(path)) == _ALONE):
        table.unmergeable.discard(path)
        return []
    return [path] if lacks else []


def merge_entry(table: MergeTable, path: str, before: Any, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
    """Return the whole batch's value at `path`, merged from the values of micro-batches.

    The arguments are those of `learn_entry`.

    Raises:
        SplitError: If the rules do not apply to these values, or rules that agreed so far differ here.
    """
    written = _written(values)
    if before is ABSENT and table.knows(_made(path)) and (kind := _made_kind(values)):
        return _merge_made(table, path, kind, written, weights)
    before = _or_empty_list(before, values)
    changes = _alike([_change(before, value) for value in values])
    adds = _adds(table, path) and all(change is not None for change in changes)
    joins = table.rule(path) == "concatenate 0"
    if table.rule(_alone(path)) == _ALONE and (len(written) < len(values) or not table.knows(path)):
        if len(written) == 1:
            return written[0]
        if (adds and are_whole_numbers(written)) or (joins and all(same(one, written[0]) for one in written)):
            raise refusal_of_merge(path)
        if not joins:
            return merged("equal", written, weights)
    is_compared = before is not ABSENT and table.knows(path) and not (adds and table.all_rules(_added(path)) == {"sum"})
    if is_compared and not table.decides(path, _filled(values, before), weights):
        raise refusal_of_merge(path)
    last = last_writes(before, _filled(values, before)) if keeps_last_writes(table, path) else None
    if adds and table.rule(path) != "equal":
        change = sum(changes[1:], changes[0])
        total = change if before is ABSENT else before + change
        if last is not None and not same(last, total, tolerance=1e-5):  # two micro-batches write an entry
            raise refusal_of_merge(path)
        return total if last is None else last
    if last is not None and table.rule(path) is None:
        return last
    if before is ABSENT and len(written) < len(values):
        raise refusal_of_merge(path)
    return merge_tree(table, _filled(values, before), weights, fallback=_refuse, path=path)


def note_alone(table: MergeTable, path: str) -> None:
    """Record that what one micro-batch writes at `path`, or beside it in a dict, stays."""
    table.note(_alone(path), _ALONE)


def is_known(table: MergeTable, path: str, before: Any) -> bool:
    """Return whether checks have found how values at `path` merge, given the value before."""
    if before is ABSENT and table.knows(_made(path)):
        return True
    if "sum" in table.all_rules(path) and "sum" in table.all_rules(_added(path)):  # it was always 0 before
        return before is ABSENT or not bool(torch.as_tensor(before).any())
    return _keeps_writes(table, path) or any(map(table.knows, _paths_of(table, path)))


def is_mergeable(table: MergeTable, path: str) -> bool:
    """Return whether some rule merges the values written at `path`."""
    if table.knows(_made(path)) or _keeps_writes(table, path):
        return True
    return any(table.rule(one) is not None for one in _paths_of(table, path))


def _keeps_writes(table: MergeTable, path: str) -> bool:
    """Return whether changes add up, or writes stay as they are."""
    return _adds(table, path) or keeps_last_writes(table, path) or table.rule(_alone(path)) == _ALONE


def _paths_of(table: MergeTable, path: str) -> list[str]:
    return [one for one in table.paths if one == path or one.startswith(f"{path}.")]


def _learn_values(
    table: MergeTable, path: str, values: Sequence[Any], weights: MicroBatchWeights, *, tolerance: float
) -> bool:
    """Learn from the values of the whole batch and of the micro-batches.

    Return whether no rule fits.
    """
    unmergeable = set(table.unmergeable)
    learn_tree(table, values[1:], values[0], weights, tolerance=tolerance, path=path)
    new = table.unmergeable - unmergeable
    if new and "sum" in table.all_rules(_added(path)):
        table.unmergeable -= new
    return bool(new)


def _is_step_of_two(before: Any, values: Sequence[Any]) -> bool:
    """Return whether three or more values are one number above the value before, or one below it.

    A controller steps up or down by a mean of the batch (`self.limit += 0.01 if share > 0.5 else -0.01`). The whole batch then writes the
    value that most micro-batches write, which is their largest or smallest only by chance.
    """
    numbers = [_as_float(one) for one in (before, *values) if _is_one_number(one)]
    if len(numbers) < len(values) + 1 or len(values) < 3:
        return False
    low, high = min(numbers[1:]), max(numbers[1:])
    return low < numbers[0] < high and {*numbers[1:]} == {low, high}


def _steps_add_up_by_chance(table: MergeTable, path: str, before: Any, after: Any) -> bool:
    """Leave out the sum of such steps, as of two down and one up; return whether it is left out.

    Whole numbers are counts, whose sum stays.
    """
    if _as_float(after - before).is_integer():
        return False
    table.drop(_added(path), {"sum"})
    table.unmergeable.discard(_added(path))
    return True


def _as_float(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _is_one_number(value: Any) -> bool:
    return is_number(value) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())


def _learn_change(
    table: MergeTable,
    path: str,
    before: Any,
    whole: Any,
    values: Sequence[Any],
    weights: MicroBatchWeights,
    *,
    tolerance: float,
) -> bool:
    """Learn whether changes add up, and return it, as zeros before let other rules fit."""
    all_of, *changes = _alike([_change(before, value) for value in (whole, *values)])
    keys = dict.fromkeys((_added(path), _added(_family(path))))
    for key in keys:
        if all_of is not None and not any(change is None for change in changes):
            table.learn(key, changes, all_of, weights, tolerance=tolerance)
        elif key != _added(path):
            table.reject(key)
        table.unmergeable.discard(key)
    return "sum" in table.all_rules(_added(path))


def _learn_made(
    table: MergeTable, path: str, kind: type, values: Sequence[Any], weights: MicroBatchWeights, *, tolerance: float
) -> list[str]:
    """Learn how a created dict or set merges, by entry; `values` begin with the whole batch's."""
    if values[0] is UNWRITTEN:
        return [path]
    table.note(_made(path), "by entry")
    if issubclass(kind, (set, frozenset)):
        return [] if values[0] == set().union(*_written(values[1:])) else [path]
    troubles = []
    for name in _names(_written(values)):
        whole, *others = [UNWRITTEN if one is UNWRITTEN else one.get(name, UNWRITTEN) for one in values]
        troubles += learn_entry(table, _item(path, name), ABSENT, whole, others, weights, tolerance=tolerance)
    return troubles


def _merge_made(table: MergeTable, path: str, kind: type, made: Sequence[Any], weights: MicroBatchWeights) -> Any:
    if issubclass(kind, (set, frozenset)):
        return kind().union(*made)
    whole = copy(made[-1])
    whole.clear()
    for name in _names(made):
        whole[name] = merge_entry(table, _item(path, name), ABSENT, [one.get(name, UNWRITTEN) for one in made], weights)
    return whole


def _made_kind(values: Sequence[Any]) -> type | None:
    """Return the type of dicts or sets of one type; None for anything else."""
    kinds = {type(value) for value in _written(values)}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind if kind is not None and issubclass(kind, (dict, set, frozenset)) else None


def _names(made: Sequence[Mapping[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(name for one in made for name in one))


def _or_empty_list(before: Any, values: Sequence[Any]) -> Any:
    """Return an empty list in place of `ABSENT` where lists were written."""
    return [] if before is ABSENT and all(isinstance(one, list) for one in _written(values)) else before


def _written(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not UNWRITTEN]


def _filled(values: Sequence[Any], before: Any) -> list[Any]:
    return [before if value is UNWRITTEN else value for value in values]


def _alike(changes: Sequence[Any]) -> list[Any]:
    """Return the changes, with zeros of their type and shape for runs that did not write."""
    zero = next((change * 0 for change in changes if change is not None and change is not UNWRITTEN), None)
    return [zero if change is UNWRITTEN else change for change in changes]


def _change(before: Any, after: Any) -> Any:
    return UNWRITTEN if after is UNWRITTEN else difference(before, after)


def _adds(table: MergeTable, path: str) -> bool:
    key = _added(path) if table.knows(_added(path)) else _added(_family(path))
    return "sum" in table.all_rules(key)


def _item(path: str, name: Any) -> str:
    return f"{path}[{name!r}]"


def _family(path: str) -> str:
    """Return one path for all entries of a dict."""
    return f"{path.rsplit('[', 1)[0]}[*]" if path.endswith("]") else path


def _made(path: str) -> str:
    return f"{path} (made)"


def _added(path: str) -> str:
    return f"{path} (change)"


def _alone(path: str) -> str:
    return f"{_family(path)} (alone)"


def _refuse(path: str, _values: Sequence[Any]) -> Any:
    raise refusal_of_merge(path)


def refusal_of_merge(path: str) -> SplitError:
    """Return the error for values of micro-batches that no longer merge as in the checked batches."""
    return SplitError(
        f"the step writes {path}, and the values that micro-batches write no longer merge as in the checked batches; write it once a "
        "batch, in on_train_batch_end or on_validation_batch_end, or declare MicroBatchRules(splittable=False)."
    )


def refusal_of_layers(path: str) -> SplitError:
    """Return the error for layers that each micro-batch makes, with weights of its own draws."""
    return SplitError(
        f"the step writes {path}, a layer, and each micro-batch made one of its own. Make it in __init__, configure_model or "
        "on_train_batch_start, or only where there is none yet; or declare MicroBatchRules(splittable=False) to run batches whole."
    )
