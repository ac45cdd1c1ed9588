"""The results of a batch that ran as micro-batches: outputs, logs, metrics and written state, put together by the rules that fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MergeRules
from lightning_unified.training.exactness.merging import MergeTable, Parts, merged
from lightning_unified.training.split.containers import with_fields, with_items

__all__ = ["Tables", "learn_tree", "merge_tree"]


@dataclass
class Tables:
    """The merge rules of one stage.

    Args:
        outputs: For what the step returns.
        logs: For what it logs.
        sized_logs: For what it logs with a `batch_size`, weighted by that.
        metrics: For the states of torchmetrics objects.
        written: For buffers, frozen parameters and attributes that the step writes.
    """

    outputs: MergeTable = field(default_factory=MergeTable)
    logs: MergeTable = field(default_factory=MergeTable)
    sized_logs: MergeTable = field(default_factory=MergeTable)
    metrics: MergeTable = field(default_factory=MergeTable)
    written: MergeTable = field(default_factory=MergeTable)

    @classmethod
    def of(cls, rules: MergeRules) -> "Tables":
        """Return tables that begin with what the user has given."""
        return cls(outputs=MergeTable(given=rules.outputs), logs=MergeTable(given=rules.logs))


def learn_tree(
    table: MergeTable, values: Sequence[Any], whole: Any, parts: Parts, *, tolerance: float, path: str = ""
) -> None:
    """Learn how values that may be nested are put together.

    Args:
        table: Where the rules are kept.
        values: One for each part.
        whole: The whole's value.
        parts: What the parts weigh.
        tolerance: Relative difference that is rounding.
        path: Where the values are: keys, indices and field names joined by dots.
    """
    if path in table.given:
        return
    columns = _columns([whole, *values])
    if columns is None:
        table.learn(path, values, whole, parts, tolerance=tolerance)
        return
    for name, (inner, *others) in columns.items():
        learn_tree(table, others, inner, parts, tolerance=tolerance, path=_joined(path, name))


def merge_tree(table: MergeTable, values: Sequence[Any], parts: Parts, *, fallback: Any, path: str = "") -> Any:
    """Return the whole batch's value.

    Args:
        table: The rules.
        values: One for each micro-batch.
        parts: What they weigh.
        fallback: `fallback(path, values)` gives the value where no rule is known or none fits.
        path: Where the values are.
    """
    rule = table.rule(path)
    columns = None if rule is not None else _columns(values)
    if columns is not None:
        inner = {
            name: merge_tree(table, column, parts, fallback=fallback, path=_joined(path, name))
            for name, column in columns.items()
        }
        return _rebuilt(values[0], inner)
    if rule is None:
        return fallback(path, values)
    try:
        return merged(rule, values, parts)
    except SplitError:
        table.reject(path)
        return fallback(path, values)


def unknown_paths(table: MergeTable, values: Sequence[Any], path: str = "") -> Iterable[str]:
    """Yield the paths in nested values about which nothing is known."""
    columns = None if table.knows(path) else _columns(values)
    if columns is None:
        if not table.knows(path):
            yield path
        return
    for name, column in columns.items():
        yield from unknown_paths(table, column, _joined(path, name))


def _joined(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _columns(values: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """Return the entries of containers of one kind and the same names, by name; None for anything else."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, Mapping):
        same = all(value.keys() == first.keys() for value in values)
        return {key: [value[key] for value in values] for key in first} if same else None
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return {name: [getattr(value, name) for value in values] for name in first._fields}
    if isinstance(first, (list, tuple)):
        same = len({len(value) for value in values}) == 1
        return {index: [value[index] for value in values] for index in range(len(first))} if same and first else None
    if is_dataclass(first) and not isinstance(first, type):
        return {one.name: [getattr(value, one.name) for value in values] for one in fields(first)}
    return None


def _rebuilt(like: Any, entries: dict[Any, Any]) -> Any:
    if isinstance(like, Mapping):
        return with_items(like, entries)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(**entries)
    if isinstance(like, (list, tuple)):
        return type(like)(entries.values())
    names = iter(entries.values())
    return with_fields(like, lambda _: next(names))
