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

from lightning_unified.training.snapshot import metric_state, set_metric_state
from lightning_unified.training.undo import Roots, StateWatch

__all__ = ["LogRecorder", "MetricsOverParts", "metrics_of"]


@dataclass(slots=True)
class _Call:
    """One name that `self.log` was called with, and its values so far, each with the micro-batch it came from."""

    fx: str
    name: str
    options: dict[str, Any]
    parts: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    batch_sizes: list[Any] = field(default_factory=list)


class LogRecorder:
    """Holds back `self.log` calls while micro-batches run, then logs each name once with the whole batch's value.

    Lightning's own collection would keep the last micro-batch's value as the step's, and would weight every micro-batch as a whole
    batch in the epoch's mean, because it caches the batch size (result.py, `_extract_batch_size`).
    A value is reduced by its `reduce_fx`: sums add, maxima and minima compare, means are averaged by the `batch_size` given with
    the call, else by the micro-batches' loss weights.

    Args:
        average: Averages one figure a micro-batch by the loss weights of the micro-batches named.
    """

    def __init__(self, average: Callable[[Sequence[Any], Sequence[int]], Any]) -> None:
        self._average = average
        self._calls: dict[tuple[str, str, int], _Call] = {}
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
        self._calls, self._seen = {}, {}

    @property
    def names(self) -> set[tuple[str, str, int]]:
        """What has been recorded: hook, name, and how often before in the same micro-batch."""
        return set(self._calls)

    def keep(self, names: AbstractSet[tuple[str, str, int]]) -> None:
        """Drop what is not among `names`."""
        self._calls = {key: call for key, call in self._calls.items() if key in names}

    def flush(self, results: _ResultCollection) -> None:
        """Log every recorded name once, with the value of the whole batch."""
        for call in self._calls.values():
            value, batch_size = self._reduced(call)
            cast("Any", results).log(call.fx, call.name, value, **call.options, batch_size=batch_size)

    def _record(self, fx: str, name: str, value: Any, *, batch_size: Any = None, **options: Any) -> None:
        # a name logged twice in one training_step is two streams: each occurrence is merged with its like
        occurrence = self._seen.get((fx, name), 0)
        self._seen[fx, name] = occurrence + 1
        call = self._calls.setdefault((fx, name, occurrence), _Call(fx, name, options))
        call.parts.append(self._part)
        call.values.append(value.detach() if isinstance(value, Tensor) else value)
        call.batch_sizes.append(batch_size)

    def _reduced(self, call: _Call) -> tuple[Any, Any]:
        if isinstance(call.values[0], Metric):
            return call.values[-1], call.batch_sizes[-1]
        reduce_fx = call.options.get("reduce_fx", "mean")
        how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        given = all(size is not None for size in call.batch_sizes)
        batch_size = sum(call.batch_sizes) if given else None
        if len(call.values) == 1:
            return call.values[0], batch_size
        values = torch.stack(call.values)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()  # as Lightning stores them; a sum of these may not fit 16 bits
        if how in _REDUCTIONS:
            return _REDUCTIONS[how](values), batch_size
        if batch_size is None:
            return self._average(values.unbind(), call.parts), None
        counts = torch.as_tensor(call.batch_sizes, device=values.device)
        return (values * counts).sum() / batch_size, batch_size


_REDUCTIONS = {"sum": torch.sum, "max": torch.max, "amax": torch.max, "min": torch.min, "amin": torch.min}


class MetricsOverParts:
    """Gives each torchmetrics object the step value of the whole batch, from the micro-batches it was updated with.

    The metric is emptied before the first micro-batch, so that what it holds after the last is the batch's own state: its
    value is the step value, and joining it with the state from before is what `Metric.forward` does for a whole batch
    (torchmetrics/metric.py, `_forward_reduce_state_update`). A metric that says its update needs the full state
    (`full_state_update` not False) is left to accumulate, and an empty twin beside it gathers the batch: `Metric.forward` too
    updates such a metric twice. A metric that `training_step` itself asks for its value (`compute`) answers for a micro-batch.

    Args:
        metrics: The module's torchmetrics objects.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._joined = [(metric, metric_state(metric)) for metric in metrics if _can_join(metric)]
        self._twinned = [_Twin(metric) for metric in metrics if not _can_join(metric)]
        for metric, _ in self._joined:
            metric.reset()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the twins see the updates inside the block."""
        with ExitStack() as stack:
            for twin in self._twinned:
                stack.enter_context(twin.watching())
            yield

    def finish(self) -> None:
        """Set step values and join the batch's state with what was there before."""
        for metric, before in self._joined:
            if metric._update_count == 0:
                set_metric_state(metric, before)
            else:
                _join(metric, before)
        for twin in self._twinned:
            twin.finish()


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


def _emptied_copy(metric: Metric) -> Metric:
    state = metric_state(metric)
    metric.reset()  # first, for the state so far may be large
    try:
        return deepcopy(metric)
    finally:
        set_metric_state(metric, state)


def _can_join(metric: Metric) -> bool:
    return metric.full_state_update is False and not metric.dist_sync_on_step


def _join(metric: Metric, before: dict[str, Any]) -> None:
    """Compute the value of the state gathered in this batch, then add that state to `before`."""
    was_forwarded = metric._forward_cache is not None
    if was_forwarded:
        metric._to_sync, metric._should_unsync = metric.dist_sync_on_step, False
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
