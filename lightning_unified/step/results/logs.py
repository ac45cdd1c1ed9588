"""Record the `self.log` calls of micro-batches, and log the whole batch once."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _METRICS,
    _Metadata,
    _ResultCollection,
    _ResultMetric,
)
from torch import Tensor

__all__ = ["LogKey", "LogRecorder", "Logged", "inside_hook", "path_of_log"]


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

    def next_micro_batch(self, index: int) -> None:
        """Attribute later logs to micro-batch `index`."""
        self._part, self._seen = index, {}

    @contextmanager
    def recording(self, results: _ResultCollection | None) -> Iterator[None]:
        """Stand in for `results.log` inside the block; where nothing can be logged there is nothing to stand in for."""
        if results is None:
            yield
            return
        outer = {name: results.__dict__.get(name) for name in ("log", "metrics")}
        results.__dict__["log"] = self._record
        results.__dict__["metrics"] = partial(self._metrics, results, results.metrics)
        is_empty = not results
        if is_empty:  # Lightning asks an empty collection for nothing
            results[_NOTHING] = _EMPTY
        try:
            yield
        finally:
            if is_empty:
                results.pop(_NOTHING, None)
            for name, method in outer.items():
                del results.__dict__[name]
                if method is not None:
                    results.__dict__[name] = method

    def _metrics(self, results: _ResultCollection, outer: Callable[[bool], _METRICS], on_step: bool) -> _METRICS:
        """Return what `trainer.callback_metrics` and its like are made from, with what this micro-batch has logged so far."""
        metrics = outer(on_step)
        own = _ResultCollection(training=results.training)
        own.dataloader_idx, own.batch, own.batch_size = results.dataloader_idx, results.batch, results.batch_size
        for call in self.logged.values():
            if call.parts[-1] == self._part:
                cast("Any", own).log(
                    call.fx, call.name, call.values[-1], **call.options, batch_size=call.batch_sizes[-1]
                )
        for kind, logged in own.metrics(on_step).items():
            cast("Any", metrics)[kind].update(logged)
        return metrics

    def forget(self) -> None:
        """Drop all recorded logs."""
        self.logged, self._seen = {}, {}

    @property
    def names(self) -> set[LogKey]:
        """The recorded logs: hook, name, and how often before in the same micro-batch."""
        return set(self.logged)

    def keep(self, names: AbstractSet[LogKey]) -> None:
        """Drop the logs that are not among `names`."""
        self.logged = {key: call for key, call in self.logged.items() if key in names}

    def flush(
        self,
        results: _ResultCollection,
        reduce: Callable[[LogKey, Logged], tuple[Any, Any]] | None = None,
        *,
        by_steps: bool = False,
    ) -> None:
        """Log every recorded name once, and drop it.

        Args:
            results: Where Lightning gathers what is logged.
            reduce: Returns the whole batch's value and `batch_size`; by default they are the last ones recorded.
            by_steps: Whether to keep names that hooks have logged for another flush.
        """
        chosen = {key: call for key, call in self.logged.items() if not by_steps or call.fx.endswith("_step")}
        self.logged = {key: call for key, call in self.logged.items() if key not in chosen}
        for key, call in chosen.items():
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


_NOTHING = "nothing"  # a key without a dot, which none of Lightning's is


def _nothing() -> _ResultMetric:
    """Return a result that has no value."""
    result = _ResultMetric(_Metadata(fx=_NOTHING, name=_NOTHING), is_tensor=True)
    result.has_reset = True
    return result


_EMPTY = _nothing()  # made once, and not among the tensors of a step


def path_of_log(key: LogKey) -> str:
    """Return the path under which a merge rule for a logged name is kept: the name, numbered where it is logged more than once."""
    _, name, occurrence = key
    return name if not occurrence else f"{name} (call {occurrence + 1})"


@contextmanager
def inside_hook(module: L.LightningModule, name: str) -> Iterator[None]:
    """Have `self.log` inside the block treat values as logged in the hook `name`, as `Trainer` does around each hook."""
    outer, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = outer
