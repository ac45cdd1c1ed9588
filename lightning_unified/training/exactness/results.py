"""The results of a batch that ran as micro-batches: outputs, logs, metrics and written state, put together by the rules that fit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_unified.errors import SplitError
from lightning_unified.micro_batches import MergeRules
from lightning_unified.training.exactness.merging import MergeTable, Parts, merged
from lightning_unified.training.exactness.run import Results
from lightning_unified.training.exactness.written import learn_written
from lightning_unified.training.logs import Logged, path_of_log
from lightning_unified.training.split.containers import entries_of, is_sequence, joined, with_entries

__all__ = ["Tables", "all_paths", "learn_results", "merge_tree", "refusal_of_state", "unknown_paths"]


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


def learn_results(
    tables: Tables, whole: Results, runs: Sequence[Results], parts: Parts, *, tolerance: float
) -> str | None:
    """Learn how outputs, logs, metrics and written state of parts become the whole's.

    Args:
        tables: Where the rules are kept.
        whole: What the whole rows gave.
        runs: What the parts gave.
        parts: What they weigh.
        tolerance: Relative difference that is rounding.

    Returns:
        In words what the step writes that nothing puts together; None if there is nothing.
    """
    learn_tree(tables.outputs, [run.returned for run in runs], whole.returned, parts, tolerance=tolerance)
    for key in {*whole.logs, *(key for run in runs for key in run.logs)}:
        calls = [run.logs.get(key) for run in runs]
        _learn_log(tables, path_of_log(key), whole.logs.get(key), calls, parts, tolerance=tolerance)
    for path, state in whole.metrics.items():
        for name, value in state.items():
            values = [run.metrics.get(path, {}).get(name) for run in runs]
            tables.metrics.learn(f"{path}.{name}", values, value, parts, tolerance=tolerance)
    return learn_written(tables.written, whole.written, [run.written for run in runs], parts, tolerance=tolerance)


def _learn_log(
    tables: Tables, path: str, whole: Logged | None, calls: Sequence[Logged | None], parts: Parts, *, tolerance: float
) -> None:
    given = [call for call in calls if call is not None]
    if whole is None or len(given) < len(calls):
        tables.logs.reject(path)
        return
    if not isinstance(whole.values[-1], Tensor):  # a metric, whose states are put together themselves
        return
    values, sizes = [call.values[-1] for call in given], [call.batch_sizes[-1] for call in given]
    tables.logs.learn(path, values, whole.values[-1], parts, tolerance=tolerance)
    if whole.batch_sizes[-1] is None or None in sizes:
        return
    tables.logs.learn(f"batch_size of {path}", sizes, whole.batch_sizes[-1], parts, tolerance=0.0)
    weighted = Parts(parts.rows, list(map(float, sizes)))
    tables.sized_logs.learn(path, values, whole.values[-1], weighted, tolerance=tolerance)
    if tables.sized_logs.rule(path) == "mean":
        tables.logs.unmergeable.discard(path)


def refusal_of_state(whose: str, trouble: str) -> str:
    """Return what to say of a module whose step writes what nothing puts together.

    Args:
        whose: The module's name.
        trouble: What it writes, in words.
    """
    return (
        f"{whose} writes {trouble} in its step, and what micro-batches write is not what the whole batch writes. Write it once a batch: in "
        "on_train_batch_end or on_before_zero_grad; or declare MicroBatchRules(splittable=False) to run batches whole, or check=False to "
        "split all the same."
    )


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
        learn_tree(table, others, inner, parts, tolerance=tolerance, path=joined(path, name))


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
            name: merge_tree(table, column, parts, fallback=fallback, path=joined(path, name))
            for name, column in columns.items()
        }
        return with_entries(values[0], list(inner.items()))
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
        yield from unknown_paths(table, column, joined(path, name))


def all_paths(table: MergeTable, values: Sequence[Any], path: str = "") -> Iterable[str]:
    """Yield the paths of all values that are put together by a rule of their own."""
    columns = None if table.knows(path) else _columns(values)
    if columns is None:
        yield path
        return
    for name, column in columns.items():
        yield from all_paths(table, column, joined(path, name))


def _columns(values: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """Return the entries of containers of one kind and the same names, by name; None for anything else."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return None
    entries = [entries_of(value) for value in values]
    if entries[0] is None or (is_sequence(first) and not first):
        return None
    names = [[name for name, _ in one or ()] for one in entries]
    if any(other != names[0] for other in names):
        return None
    return {name: [(one or [])[index][1] for one in entries] for index, name in enumerate(names[0])}
