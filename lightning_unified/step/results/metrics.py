"""Merge the states and values of torchmetrics objects over micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_unified.errors import SplitError
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights, merged
from lightning_unified.step.results.metric_resets import ResetRecord, refusal_of_reset
from lightning_unified.step.results.sameness import same
from lightning_unified.step.undo import Roots, StateWatch

__all__ = [
    "ComputeRecord",
    "MetricsOverMicroBatches",
    "UpdateRecord",
    "can_join",
    "metric_state",
    "metrics_of",
    "reduced",
    "set_metric_state",
    "without_seams",
]

_METRIC_COUNTERS = ("_update_count", "_forward_cache", "_computed", "_is_synced", "_cache")


class MetricsOverMicroBatches:
    """Gives each torchmetrics object the state and the step value of the whole batch.

    The metric is emptied before each micro-batch. The states that the micro-batches leave are merged by the rules that the exactness check
    has found, or else by the metric's own reductions. The result is the batch's own state. Its value is the step value. Joining it with the
    state from before is the same as `Metric.forward` on a whole batch (torchmetrics/metric.py, `_forward_reduce_state_update`).

    A metric may declare that its update needs the full state (`full_state_update` not False). It is joined like the others if the exactness check has
    found that its states add up. Otherwise it accumulates over the micro-batches, and an empty twin beside it gathers the batch:
    `Metric.forward` also updates such a metric twice. One whose value `training_step` reads (`compute`) answers for a micro-batch.

    Args:
        metrics: The module's torchmetrics objects, by path.
        table: Rules for their states, by path.
        joins: Whether the check found that a metric's states add up; by path.
    """

    def __init__(self, metrics: Mapping[str, Metric], table: MergeTable, joins: Mapping[str, bool]) -> None:
        self._table = table
        self._joined = {path: one for path, one in metrics.items() if can_join(one) or joins.get(path, False)}
        self._before = {path: metric_state(metric) for path, metric in self._joined.items()}
        self._states: dict[str, list[dict[str, Any] | None]] = {path: [] for path in self._joined}
        self._twinned = [_Twin(metric) for path, metric in metrics.items() if path not in self._joined]
        self._emptied: dict[str, list[bool]] = {path: [] for path in self._joined}  # by the step, in each micro-batch

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Gather the states of one micro-batch, which runs inside the block."""
        for metric in self._joined.values():
            metric.reset()
        resets = ResetRecord()
        with resets.watching(), ExitStack() as stack:
            for twin in self._twinned:
                stack.enter_context(twin.watching(resets))
            yield
        for path, metric in self._joined.items():
            self._states[path].append(metric_state(metric) if metric._update_count else None)
            self._emptied[path].append(resets.has(metric))

    def finish(self, weights: MicroBatchWeights) -> None:
        """Set step values, and join the batch's state with the state from before.

        Raises:
            SplitError: If the step emptied a metric in some micro-batches only.
        """
        for path, metric in self._joined.items():
            if len({*self._emptied[path]}) > 1:
                raise refusal_of_reset(path)
            if any(self._emptied[path]):
                metric.reset()
                self._before[path] = metric_state(metric)
            indices = [index for index, state in enumerate(self._states[path]) if state is not None]
            if not indices:
                set_metric_state(metric, self._before[path])
                continue
            states = [state for state in self._states[path] if state]
            set_metric_state(metric, self._merged(path, metric, states, weights.of(indices)))
            _join(metric, self._before[path])
        for twin in self._twinned:
            twin.finish()

    def _merged(
        self, path: str, metric: Metric, states: Sequence[dict[str, Any]], weights: MicroBatchWeights
    ) -> dict[str, Any]:
        """Return the state of the whole batch.

        If any of the metric's states has no rule from the check, all are reduced by the metric's own reductions: a mean is the quotient of
        two states, so both must be those of one computation.
        """
        result = dict(states[-1])
        if len(states) == 1:
            return result
        values = {name: [state[name] for state in states] for name in metric._defaults}
        found = {name: self._table.rule(f"{path}.{name}") for name in values}
        rules = {name: rule for name, rule in found.items() if rule is not None}
        if len(rules) == len(found):
            with suppress(SplitError):
                return result | {name: _by_rule(rule, values[name], weights) for name, rule in rules.items()}
        return result | {name: reduced(each, metric._reductions[name]) for name, each in values.items()}


def reduced(values: Sequence[Any], reduction: Any) -> Any:
    """Return one state of a metric for several batches, by the reduction that the metric declares."""
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    return values[-1] if reduction is None else reduction(torch.stack(list(values)))


def _by_rule(rule: Any, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
    """Return one state of the whole batch by a rule; the rules of lists hold for their entries, put together."""
    is_list = all(isinstance(value, list) for value in values)
    if not is_list or str(rule).startswith("concatenate"):
        return merged(rule, values, weights)
    single = all(len(value) == 1 for value in values)
    return [merged(rule, [value[0] if single else without_seams(value) for value in values], weights)]


def without_seams(state: Any) -> Any:
    """Return a list of tensors as one tensor; some metrics append an entry per update."""
    if not (isinstance(state, list) and state and all(isinstance(entry, Tensor) for entry in state)):
        return state
    try:
        return torch.cat([torch.atleast_1d(entry) for entry in state])
    except RuntimeError:  # entries of different shapes, such as one per image
        return state


class UpdateRecord:
    """Records a metric's updates, to find out whether its states add up.

    States add up if joining the states of two batches gives the state of both.

    Args:
        metric: An empty metric that does not declare this itself.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._calls: list[tuple[Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the updates inside the block."""
        update = self._metric.update

        def noting(*args: Any, **kwargs: Any) -> Any:
            self._calls.append(apply_to_collection((args, kwargs), Tensor, Tensor.detach))
            return update(*args, **kwargs)

        with _replaced(self._metric, "update", noting):
            yield

    @property
    def has_calls(self) -> bool:
        """Whether the metric was updated."""
        return bool(self._calls)

    def adds_up(self, *, tolerance: float) -> bool:
        """Return whether the state after all updates, run twice, is the joined state of two runs."""
        if self._metric.dist_sync_on_step:
            return False
        try:
            once = self._updated(_emptied_copy(self._metric))
            twice = self._updated(self._updated(_emptied_copy(self._metric)))
            state = metric_state(once)
            once._update_count = 2
            once._reduce_states({name: state[name] for name in once._defaults})
        except Exception:  # a metric may raise anything in a use that it does not support
            return False
        names = self._metric._defaults
        return all(same(getattr(once, name), getattr(twice, name), tolerance=tolerance) for name in names)

    def _updated(self, metric: Metric) -> Metric:
        for args, kwargs in self._calls:
            metric.update(*args, **kwargs)
        return metric


class _Total(Tensor):
    """A number over all batches so far; torch's operators pass this class on to their results."""


class ComputeRecord:
    """Records the numbers that a step reads from metrics by `compute`.

    They cover all batches so far. Numbers that `forward` returns are the batch's own.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        self._values: list[Tensor] = []
        self._inside = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the numbers that `compute` returns inside the block."""
        with ExitStack() as stack:
            for metric in self._metrics:
                stack.enter_context(_replaced(metric, "compute", self._noting(metric.compute)))
                stack.enter_context(_replaced(metric, "forward", self._forward(metric.forward)))
            yield

    def has(self, value: Tensor) -> bool:
        """Return whether `value` is one of the recorded numbers, or a tensor computed from them."""
        return isinstance(value, _Total) or any(same(value.cpu().double(), one, tolerance=1e-6) for one in self._values)

    def _noting(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            value = compute(*args, **kwargs)
            return value if self._inside else apply_to_collection(value, Tensor, self._noted)

        return noting

    def _noted(self, value: Tensor) -> Tensor:
        self._values.extend(value.detach().cpu().double().reshape(-1))
        return value.as_subclass(_Total)

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside -= 1

        return inside


@contextmanager
def _replaced(metric: Metric, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of `metric` inside the block."""
    attributes = vars(cast("Any", metric))
    own = attributes.get(name)
    attributes[name] = method
    try:
        yield
    finally:
        if own is None:
            del attributes[name]
        else:
            attributes[name] = own


class _Twin:
    """An empty copy of a metric that gathers one batch.

    It is made at the metric's first call in a batch, and receives the same updates.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._twin: Metric | None = None

    @contextmanager
    def watching(self, resets: ResetRecord) -> Iterator[None]:
        """Update the copy too, at each call of the metric inside the block."""
        forward = self._metric.forward

        def forward_both(*args: Any, **kwargs: Any) -> Any:
            with resets.paused():
                if self._twin is None:
                    self._twin = _emptied_copy(self._metric)
                self._twin.update(*args, **kwargs)
            return forward(*args, **kwargs)

        with _replaced(self._metric, "forward", forward_both):
            yield

    def finish(self) -> None:
        """Set the step value of the metric, if it was called."""
        if self._twin is not None:
            self._metric._forward_cache = self._twin.compute()


def metrics_of(module: torch.nn.Module) -> list[Metric]:
    """Return the torchmetrics objects with a state that `module` holds.

    These are submodules, and objects in its dicts, lists and objects.
    """
    watch = StateWatch(lambda: Roots([(module, type(module).__name__)]), tensors=False)
    watch.look()
    return list(watch.named_metrics.values())


def _emptied_copy(metric: Metric) -> Metric:
    state = metric_state(metric)
    metric.reset()  # before the copy, because the state so far may be large
    try:
        return deepcopy(metric)
    finally:
        set_metric_state(metric, state)


def can_join(metric: Metric) -> bool:
    """Return whether a batch's own state can be joined with the state from before.

    The batch's own state is the one gathered in an empty metric.
    """
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
    metric._is_synced, metric._should_unsync = False, True
    metric._to_sync, metric._computed = metric.sync_on_compute, None


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a copy of a metric's state.

    Tensors are copied, because metrics add to them in place. Lists are copied shallowly, because they only grow.
    """
    state: dict[str, Any] = {name: metric.__dict__.get(name) for name in _METRIC_COUNTERS}
    for name in metric._defaults:
        value = getattr(metric, name)
        state[name] = value.detach().clone() if isinstance(value, Tensor) else list(value)
    return state


def set_metric_state(metric: Metric, state: dict[str, Any]) -> None:
    """Set the state of `metric` to copies of `state`, so that `state` can be used again."""
    for name, value in state.items():
        if name in metric._defaults:
            setattr(metric, name, value.clone() if isinstance(value, Tensor) else list(value))
        else:
            setattr(metric, name, value)
