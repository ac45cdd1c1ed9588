"""What `self.log` and torchmetrics say of a batch that ran as micro-batches: the same as if it had run whole."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import Metric

from lightning_unified.training.snapshot import metric_state, set_metric_state

__all__ = ["LogRecorder", "MetricsOverParts"]


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
    def recording(self, results: _ResultCollection) -> Iterator[None]:
        """Stand in for `results.log` inside the block."""
        results.__dict__["log"] = self._record
        try:
            yield
        finally:
            del results.__dict__["log"]

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
        if how in ("sum", "max", "amax", "min", "amin"):
            return {"sum": values.sum, "max": values.max, "amax": values.max, "min": values.min, "amin": values.min}[
                how
            ](), batch_size
        if batch_size is not None:
            weights = (
                values.new_tensor(call.batch_sizes)
                if values.is_floating_point()
                else torch.tensor(call.batch_sizes, device=values.device)
            )
            return (values * weights).sum() / batch_size, batch_size
        return self._average(call.values, call.parts), None


class MetricsOverParts:
    """Gives each torchmetrics object the step value of the whole batch, from the micro-batches it was updated with.

    The metric is emptied before the first micro-batch, so that what it holds after the last is the batch's own state: its
    value is the step value, and joining it with the state from before is what `Metric.forward` does for a whole batch
    (torchmetrics/metric.py, `_forward_reduce_state_update`). A metric that says its update needs the full state
    (`full_state_update` not False) is left to accumulate: its epoch value is exact, its step value the rows' average.

    Args:
        metrics: The module's torchmetrics objects.
        sizes: Rows of each micro-batch.
    """

    def __init__(self, metrics: Sequence[Metric], sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._joined = [(metric, metric_state(metric)) for metric in metrics if _can_join(metric)]
        self._averaged: list[tuple[Metric, list[Any]]] = [(metric, []) for metric in metrics if not _can_join(metric)]
        for metric, _ in self._joined:
            metric.reset()

    def after_part(self) -> None:
        """Note the step values of metrics that cannot be joined."""
        for metric, values in self._averaged:
            values.append(metric._forward_cache)

    def finish(self) -> None:
        """Set step values and join the batch's state with what was there before."""
        for metric, before in self._joined:
            if metric._update_count == 0:
                set_metric_state(metric, before)
            else:
                _join(metric, before)
        for metric, values in self._averaged:
            if len(values) > 1 and all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
                weights = torch.tensor(self._sizes, device=values[0].device).reshape(-1, *[1] * values[0].dim())
                metric._forward_cache = (torch.stack(values) * weights).sum(0) / sum(self._sizes)
                warnings.warn(
                    f"{type(metric).__name__} needs its full state for each update, so its step value is averaged over the "
                    "micro-batches; its epoch value is exact.",
                    stacklevel=2,
                )


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
