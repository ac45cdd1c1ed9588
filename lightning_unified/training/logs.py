"""What `self.log` and torchmetrics say of a batch that ran as micro-batches: the same as if it had run whole."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import Metric

from lightning_unified.errors import SplitError
from lightning_unified.training.exactness.merging import MergeTable, Parts, merged
from lightning_unified.training.snapshot import metric_state, set_metric_state
from lightning_unified.training.undo import Roots, StateWatch

__all__ = [
    "LogKey",
    "LogRecorder",
    "Logged",
    "MetricsOverParts",
    "can_join",
    "metrics_of",
    "named_metrics",
    "path_of_log",
]


@dataclass(slots=True)
class Logged:
    """One name that `self.log` was called with, and its values so far, each with the micro-batch it came from."""

    fx: str
    name: str
    options: dict[str, Any]
    parts: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    batch_sizes: list[Any] = field(default_factory=list)


LogKey = tuple[str, str, int]


class LogRecorder:
    """Holds back `self.log` calls while micro-batches run, then logs each name once with the whole batch's value.

    Lightning's own collection would keep the last micro-batch's value as the step's, and would weight every micro-batch as a whole
    batch in the epoch's mean, because it caches the batch size (result.py, `_extract_batch_size`).
    """

    def __init__(self) -> None:
        self.logged: dict[LogKey, Logged] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._part = 0

    def next_part(self, index: int) -> None:
        """Attribute what follows to micro-batch `index`."""
        self._part, self._seen = index, {}

    @contextmanager
    def recording(self, results: _ResultCollection | None) -> Iterator[None]:
        """Stand in for `results.log` inside the block; where nothing can be logged there is nothing to stand in for."""
        if results is None:
            yield
            return
        outer = results.__dict__.get("log")
        results.__dict__["log"] = self._record
        try:
            yield
        finally:
            del results.__dict__["log"]
            if outer is not None:
                results.__dict__["log"] = outer

    def forget(self) -> None:
        """Drop what has been recorded."""
        self.logged, self._seen = {}, {}

    @property
    def names(self) -> set[LogKey]:
        """What has been recorded: hook, name, and how often before in the same micro-batch."""
        return set(self.logged)

    def keep(self, names: AbstractSet[LogKey]) -> None:
        """Drop what is not among `names`."""
        self.logged = {key: call for key, call in self.logged.items() if key in names}

    def flush(
        self, results: _ResultCollection, reduce: Callable[[LogKey, Logged], tuple[Any, Any]] | None = None
    ) -> None:
        """Log every recorded name once.

        Args:
            results: Where Lightning gathers what is logged.
            reduce: Returns the whole batch's value and `batch_size`; by default they are the last ones recorded.
        """
        for key, call in self.logged.items():
            value, batch_size = (call.values[-1], call.batch_sizes[-1]) if reduce is None else reduce(key, call)
            cast("Any", results).log(call.fx, call.name, value, **call.options, batch_size=batch_size)

    def _record(self, fx: str, name: str, value: Any, *, batch_size: Any = None, **options: Any) -> None:
        # a name logged twice in one training_step is two streams: each occurrence is merged with its like
        occurrence = self._seen.get((fx, name), 0)
        self._seen[fx, name] = occurrence + 1
        call = self.logged.setdefault((fx, name, occurrence), Logged(fx, name, options))
        call.parts.append(self._part)
        call.values.append(value.detach() if isinstance(value, Tensor) else value)
        call.batch_sizes.append(batch_size)


def path_of_log(key: LogKey) -> str:
    """Return the path under which a merge rule for a logged name is kept: the name, numbered where it is logged more than once."""
    _, name, occurrence = key
    return name if not occurrence else f"{name} (call {occurrence + 1})"


class MetricsOverParts:
    """Gives each torchmetrics object the state and the step value of the whole batch, from those of the micro-batches.

    The metric is emptied before each micro-batch. The states that the micro-batches leave are put together by the rules that the
    exactness check has found, else by the metric's own reductions. The result is the batch's own state: its value is the step value,
    and joining it with the state from before is what `Metric.forward` does for a whole batch (torchmetrics/metric.py,
    `_forward_reduce_state_update`). A metric that says its update needs the full state (`full_state_update` not False) accumulates over
    the micro-batches instead, and an empty twin beside it gathers the batch: `Metric.forward` too updates such a metric twice. A metric
    that `training_step` itself asks for its value (`compute`) answers for a micro-batch.

    Args:
        metrics: The module's torchmetrics objects, by path.
        table: Rules for their states, by path.
    """

    def __init__(self, metrics: dict[str, Metric], table: MergeTable) -> None:
        self._table = table
        self._joined = {path: metric for path, metric in metrics.items() if can_join(metric)}
        self._before = {path: metric_state(metric) for path, metric in self._joined.items()}
        self._states: dict[str, list[dict[str, Any] | None]] = {path: [] for path in self._joined}
        self._twinned = [_Twin(metric) for metric in metrics.values() if not can_join(metric)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Gather the states of one micro-batch, which runs inside the block."""
        for metric in self._joined.values():
            metric.reset()
        with ExitStack() as stack:
            for twin in self._twinned:
                stack.enter_context(twin.watching())
            yield
        for path, metric in self._joined.items():
            self._states[path].append(metric_state(metric) if metric._update_count else None)

    def finish(self, parts: Parts) -> None:
        """Set step values and join the batch's state with what was there before."""
        for path, metric in self._joined.items():
            indices = [index for index, state in enumerate(self._states[path]) if state is not None]
            if not indices:
                set_metric_state(metric, self._before[path])
                continue
            states = [state for state in self._states[path] if state is not None]
            weights = Parts([parts.rows[index] for index in indices], [parts.terms[index] for index in indices])
            set_metric_state(metric, self._merged(path, metric, states, weights))
            _join(metric, self._before[path])
        for twin in self._twinned:
            twin.finish()

    def _merged(self, path: str, metric: Metric, states: Sequence[dict[str, Any]], parts: Parts) -> dict[str, Any]:
        """Return the state of the whole batch; what the check has not seen is reduced as the metric says itself."""
        result = dict(states[-1])
        if len(states) == 1:
            return result
        for name in metric._defaults:
            values = [state[name] for state in states]
            rule = self._table.rule(f"{path}.{name}")
            try:
                result[name] = _reduced(metric, name, values) if rule is None else merged(rule, values, parts)
            except SplitError:
                result[name] = _reduced(metric, name, values)
        return result


def _reduced(metric: Metric, name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    reduction = metric._reductions[name]
    return values[-1] if reduction is None else cast("Any", reduction)(torch.stack(list(values)))


class _Twin:
    """An empty copy of a metric, made when the metric is first called in a batch, and updated with what it is updated with."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._twin: Metric | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Update the copy too, whenever the metric is called inside the block."""
        forward, attributes = self._metric.forward, vars(cast("Any", self._metric))

        def forward_both(*args: Any, **kwargs: Any) -> Any:
            if self._twin is None:
                self._twin = _emptied_copy(self._metric)
            self._twin.update(*args, **kwargs)
            return forward(*args, **kwargs)

        attributes["forward"] = forward_both
        try:
            yield
        finally:
            del attributes["forward"]

    def finish(self) -> None:
        """Give the metric its step value, if it was called."""
        if self._twin is not None:
            self._metric._forward_cache = self._twin.compute()


def metrics_of(module: torch.nn.Module) -> list[Metric]:
    """Return the torchmetrics objects with a state that `module` holds: submodules, and those in its dicts, lists and objects."""
    watch = StateWatch(lambda: Roots([(module, type(module).__name__)]), tensors=False)
    watch.look()
    return watch.metrics


def named_metrics(module: torch.nn.Module, metrics: Sequence[Metric]) -> dict[str, Metric]:
    """Return `metrics` by the paths at which submodules of `module` hold them, else by their number."""
    paths = {id(child): path for path, child in module.named_modules()}
    return {paths.get(id(metric), f"metric {index}"): metric for index, metric in enumerate(metrics)}


def _emptied_copy(metric: Metric) -> Metric:
    state = metric_state(metric)
    metric.reset()  # first, for the state so far may be large
    try:
        return deepcopy(metric)
    finally:
        set_metric_state(metric, state)


def can_join(metric: Metric) -> bool:
    """Return whether the state of a batch, gathered in an empty metric, can be joined with the state from before."""
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _join(metric: Metric, before: dict[str, Any]) -> None:
    """Compute the value of the state gathered in this batch, then add that state to `before`."""
    was_forwarded = metric._forward_cache is not None
    if was_forwarded:
        metric._to_sync, metric._should_unsync = metric.dist_sync_on_step, False
        metric._computed = None
        metric._forward_cache = metric.compute()
    metric._update_count = before["_update_count"] + 1
    with torch.no_grad():
        metric._reduce_states({name: before[name] for name in metric._defaults})
    metric._is_synced, metric._should_unsync, metric._to_sync, metric._computed = (
        False,
        True,
        metric.sync_on_compute,
        None,
    )
