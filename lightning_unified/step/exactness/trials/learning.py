"""Learn from one trial how outputs, logs, metrics and written state merge."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.exactness.trials.results import Results
from lightning_unified.step.results.logs import Logged, LogKey, path_of_log
from lightning_unified.step.results.merging import LAST, MergeTable, MicroBatchWeights
from lightning_unified.step.results.metrics import reduced, without_seams
from lightning_unified.step.results.objects import holds_values, layers_of
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.state.entries import learn_entry
from lightning_unified.step.results.state.writes import Written
from lightning_unified.step.results.state.written import learn_written
from lightning_unified.step.results.trees import learn_tree
from lightning_unified.step.undo.changes import ABSENT

__all__ = [
    "differing",
    "differing_logs",
    "entries_by_rows",
    "equal_unless_drawn",
    "learn_results",
    "note_drawn",
    "without_varying",
]


def learn_results(
    tables: Tables, whole: Results, runs: Sequence[Results], weights: MicroBatchWeights, *, tolerance: float
) -> list[str]:
    """Learn how outputs, logs, metrics and written state of micro-batches merge.

    Args:
        tables: The tables that record the rules.
        whole: The results of the whole rows.
        runs: The results of the micro-batches.
        weights: The weights of the micro-batches.
        tolerance: The relative difference up to which two values count as equal.

    Returns:
        The paths of written state that no rule merges.
    """
    learn_tree(tables.outputs, [run.returned for run in runs], whole.returned, weights, tolerance=tolerance)
    for key in {*whole.logs, *(key for run in runs for key in run.logs)}:
        calls = [run.logs.get(key) for run in runs]
        _learn_log(tables, path_of_log(key), whole.logs.get(key), calls, weights, tolerance=tolerance)
    for path in whole.logged_totals:  # metrics are empty before a check, so a rule may fit by chance
        tables.logs.reject(path)
    _learn_metrics(tables, whole, runs, weights, tolerance=tolerance)
    return learn_written(tables.written, whole.written, [run.written for run in runs], weights, tolerance=tolerance)


def entries_by_rows(runs: Sequence[Results], sizes: Sequence[int]) -> set[str]:
    """Return the paths of new dict entries whose keys name the rows of the runs that make them.

    `self.masks[len(x)] = mask` makes such an entry: the whole batch has one, and its micro-batches have others.

    Args:
        runs: The runs.
        sizes: The number of rows of each.
    """
    writes = [(path, rows, one) for run, rows in zip(runs, sizes, strict=True) for path, one in run.written.items()]
    others = {
        path
        for path, rows, one in writes
        if one.before is not ABSENT or not path.endswith("]") or str(rows) not in _DIGITS.findall(path.rsplit("[")[-1])
    }
    return {path for path, _, _ in writes} - others


def differing(one: Written, other: Written) -> set[str]:
    """Return the paths at which two equal runs wrote different values, and those of the parts that differ.

    Examples are times, addresses and names made anew.
    """
    table, paths = MergeTable(), set()
    for path in {*one, *other}:
        if path not in one or path not in other:
            paths.add(path)
            continue
        learn = partial(learn_entry, table, path, one[path].before, one[path].after, [other[path].after])
        paths.update(learn(MicroBatchWeights([1], [1.0]), tolerance=0.0))
    return paths | table.unmergeable


def differing_logs(logs: Mapping[LogKey, Logged], others: Mapping[LogKey, Logged]) -> set[LogKey]:
    """Return the logs whose last values differ between two runs of the same rows."""
    return {
        key
        for key in {*logs, *others}
        if key not in logs or key not in others or not same(logs[key].values[-1], others[key].values[-1])
    }


def without_varying(tables: Tables, troubles: Sequence[str], written: Written, again: Written) -> list[str]:
    """Return `troubles` without the values that equal runs write differently; record the latter.

    Args:
        tables: The tables that record them. Of parts of a container or an object, the last micro-batch's stay; anything that is not a value
            stays as micro-batches leave it, such as the handle of a hook or a layer.
        troubles: Paths of written state that no rule merges.
        written: The writes of a run.
        again: Those of an equal run.
    """
    left, table, varying = [], tables.written, differing(written, again)
    for path in troubles:
        parts = {one for one in table.unmergeable if one.startswith(f"{path}.")}
        if path not in varying or not parts <= varying:
            left.append(path)
            continue
        tables.varying.add(path)
        if path not in written:  # an entry of a dict that the step makes
            parts = parts or {path}
        elif not holds_values(written[path].after) or layers_of(written[path].after):
            for one in [one for one in table.paths if one.startswith(f"{path}.")]:
                table.reject(one)
            continue
        for part in parts:
            table.note(part, LAST)
        table.unmergeable -= parts
    return left


def equal_unless_drawn(tables: Tables) -> set[str]:
    """Return the paths of state that is equal for equal draws, and that was not compared with other draws."""
    table = tables.written
    return {path for path in table.paths if "equal" in table.all_rules(path)} - tables.redrawn


def note_drawn(tables: Tables, written: Written, others: Written) -> None:
    """Record the state that random draws alone decide, such as noise for weights that a layer keeps.

    Flags, counts and texts are left out: they may follow rows too, of which few change them.

    Args:
        tables: The tables that record it.
        written: The writes of a run.
        others: Those of a run of the same rows with other random draws.
    """
    asked = equal_unless_drawn(tables)
    plain = {path for path, one in written.items() if isinstance(one.after, (bool, int, str))}
    tables.written.drawn |= (asked & differing(written, others)) - plain
    tables.redrawn |= asked


_DIGITS = re.compile(r"\d+")


def _learn_metrics(
    tables: Tables, whole: Results, runs: Sequence[Results], weights: MicroBatchWeights, *, tolerance: float
) -> None:
    for path, state in whole.metrics.items():
        for name, value in state.items():
            values = [without_seams(run.metrics.get(path, {}).get(name)) for run in runs]
            tables.metrics.learn(f"{path}.{name}", values, without_seams(value), weights, tolerance=tolerance)
    for path, joins in whole.joins.items():
        tables.joins[path] = joins and tables.joins.get(path, True)
    for path in {*whole.metrics, *whole.joins}:  # a wrapper may not count its updates
        state = whole.metrics.get(path, {})
        lacks_rule = any(f"{path}.{name}" in tables.metrics.unmergeable for name in state)
        given = [run.metrics[path] for run in runs if path in run.metrics]
        differs = lacks_rule and not _reduce_to(state, given, whole.reductions[path], tolerance=tolerance)
        if differs or tables.joins.get(path) is False:
            logged = [name for name, of in whole.logged_metrics.items() if of == path]
            tables.logs.unmergeable.update(logged or [path])


def _reduce_to(
    state: Mapping[str, Any], given: Sequence[Mapping[str, Any]], reductions: Mapping[str, Any], *, tolerance: float
) -> bool:
    """Return whether the metric's own reductions of the micro-batches' states give the state of the whole rows."""
    if not given:
        return False
    found = {name: reduced([one[name] for one in given], reductions[name]) for name in state}
    return all(
        same(without_seams(found[name]), without_seams(value), tolerance=tolerance) for name, value in state.items()
    )


def _learn_log(
    tables: Tables,
    path: str,
    whole: Logged | None,
    calls: Sequence[Logged | None],
    weights: MicroBatchWeights,
    *,
    tolerance: float,
) -> None:
    given = [call for call in calls if call is not None]
    if whole is None or len(given) < len(calls):
        tables.logs.reject(path)
        return
    if not isinstance(whole.values[-1], Tensor):  # a metric: its states are merged, not its value
        return
    values, sizes = [call.values[-1] for call in given], [call.batch_sizes[-1] for call in given]
    tables.logs.learn(path, values, whole.values[-1], weights, tolerance=tolerance)
    if whole.batch_sizes[-1] is None or None in sizes:
        return
    tables.logs.learn(f"batch_size of {path}", sizes, whole.batch_sizes[-1], weights, tolerance=0.0)
    weighted = MicroBatchWeights(weights.rows, list(map(float, sizes)))
    tables.sized_logs.learn(path, values, whole.values[-1], weighted, tolerance=tolerance)
    if tables.sized_logs.rule(path) == "mean":
        tables.logs.unmergeable.discard(path)
