"""Learn merge rules of nested values, and merge them, entry by entry.

The entries of an object are its attributes, and those of a shape its lengths.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights, merged
from lightning_unified.step.results.objects import attributes_of, with_attributes
from lightning_unified.step.split.containers import entries_of, is_sequence, joined, with_entries

__all__ = ["all_values", "learn_tree", "merge_tree", "undecided_paths"]


def learn_tree(
    table: MergeTable,
    values: Sequence[Any],
    whole: Any,
    weights: MicroBatchWeights,
    *,
    tolerance: float,
    path: str = "",
) -> None:
    """Learn how values that may be nested are merged.

    `path` joins keys, indices and field names by dots. `tolerance` is the largest relative difference that counts as
    rounding.
    """
    if path in table.given:
        return
    columns = _columns([whole, *values])
    if columns is None:
        table.learn(path, values, whole, weights, tolerance=tolerance)
        return
    for name, (inner, *others) in columns.items():
        learn_tree(table, others, inner, weights, tolerance=tolerance, path=joined(path, name))


def merge_tree(
    table: MergeTable, values: Sequence[Any], weights: MicroBatchWeights, *, fallback: Any, path: str = ""
) -> Any:
    """Return the whole batch's value.

    `fallback(path, values)` returns the value where no rule is known or none fits.
    """
    rule = table.rule(path)
    columns = None if rule is not None else _columns(values)
    if columns is not None:
        inner = {
            name: merge_tree(table, column, weights, fallback=fallback, path=joined(path, name))
            for name, column in columns.items()
        }
        return _like(values[0], inner)
    if rule is None:
        return fallback(path, values)
    try:
        return merged(rule, values, weights)
    except SplitError:
        table.reject(path)
        return fallback(path, values)


def all_values(table: MergeTable, values: Sequence[Any], path: str = "") -> Iterable[tuple[str, Sequence[Any]]]:
    """Yield each path that is merged by one rule, with its values, one for each micro-batch."""
    columns = None if table.knows(path) else _columns(values)
    if columns is None:
        yield path, values
        return
    for name, column in columns.items():
        yield from all_values(table, column, joined(path, name))


def undecided_paths(table: MergeTable, values: Sequence[Any], weights: MicroBatchWeights) -> list[str]:
    """Return the paths in nested values whose merge checks so far do not tell.

    No check has seen them, or the rules that are left give other results.
    """
    return [path for path, each in all_values(table, values) if not table.decides(path, each, weights)]


def _columns(values: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """Return the entries of like containers or objects, by name; None for anything else.

    Containers are alike if they have the same type and the same names. An object that all runs share stays as it is.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return None
    if entries_of(first) is None and all(value is first for value in values):
        return None
    entries = [_entries_of(value) for value in values]
    if entries[0] is None or (is_sequence(first) and not first):
        return None
    names = [[name for name, _ in one or ()] for one in entries]
    if any(other != names[0] for other in names):
        return None
    return {name: [(one or [])[index][1] for one in entries] for index, name in enumerate(names[0])}


def _entries_of(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (torch.Size, deque)):
        return list(enumerate(value))
    entries = entries_of(value)
    return attributes_of(value) if entries is None else entries


def _like(value: Any, entries: dict[Any, Any]) -> Any:
    """Return a container or object of the kind of `value` that holds `entries`."""
    if isinstance(value, torch.Size):
        return torch.Size(entries.values())
    if isinstance(value, deque):
        return deque(entries.values(), value.maxlen)
    return with_attributes(value, entries) if entries_of(value) is None else with_entries(value, list(entries.items()))
