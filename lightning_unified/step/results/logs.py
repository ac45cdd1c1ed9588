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
    """The values of one name in `self.log`, each with its micro-batch."""

    fx: str
    name: str
    options: dict[str, Any]
    micro_batches: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    batch_sizes: list[Any] = field(default_factory=list)


LogKey = tuple[str, str, int]


class LogRecorder:
    """Holds back `self.log` calls while micro-batches run, then logs each name once.

    The logged value is the whole batch's. Lightning's own collection would keep the last micro-batch's value as the step's. It would also
    weight every micro-batch as a whole batch in the epoch's mean, because it caches the batch size (result.py, `_extract_batch_size`).
    """

    def __init__(self) -> None:
        self.logged: dict[LogKey, Logged] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._micro_batch = 0

    def next_micro_batch(self, index: int) -> None:
        """Attribute later logs to micro-batch `index`."""
        self._micro_batch, self._seen = index, {}

    @contextmanager
    def recording(self, results: _ResultCollection | None) -> Iterator[None]:
        """Replace `results.log` inside the block; do nothing if `results` is None."""
        if results is None:
            yield
            return
        outer = {name: results.__dict__.get(name) for name in ("log", "metrics")}
        results.__dict__["log"] = self._record
        results.__dict__["metrics"] = partial(self._metrics, results, results.metrics)
        is_empty = not results
        if is_empty:  # Lightning does not read an empty collection
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
        """Return the values of `trainer.callback_metrics`, with this micro-batch's logs so far."""
        metrics = outer(on_step)
        own = _ResultCollection(training=results.training)
        own.dataloader_idx, own.batch, own.batch_size = results.dataloader_idx, results.batch, results.batch_size
        for call in self.logged.values():
            if call.micro_batches[-1] == self._micro_batch:
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
        """The recorded logs: hook, name, and the number of earlier calls in the same micro-batch."""
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
            results: Lightning's collection of logged values.
            reduce: Returns the whole batch's value and `batch_size`; by default the last recorded ones are logged.
            by_steps: Whether to keep names that hooks have logged for another flush.
        """
        chosen = {key: call for key, call in self.logged.items() if not by_steps or call.fx.endswith("_step")}
        self.logged = {key: call for key, call in self.logged.items() if key not in chosen}
        for key, call in chosen.items():
            value, batch_size = (call.values[-1], call.batch_sizes[-1]) if reduce is None else reduce(key, call)
            cast("Any", results).log(call.fx, call.name, value, **call.options, batch_size=batch_size)

    def _record(self, fx: str, name: str, value: Any, *, batch_size: Any = None, **options: Any) -> None:
        # a name logged twice in one training_step is two streams: each merges with the same call of other micro-batches
        occurrence = self._seen.get((fx, name), 0)
        self._seen[fx, name] = occurrence + 1
        call = self.logged.setdefault((fx, name, occurrence), Logged(fx, name, options))
        call.micro_batches.append(self._micro_batch)
        call.values.append(value.detach() if isinstance(value, Tensor) else value)
        call.batch_sizes.append(batch_size)


_NOTHING = "nothing"  # a key without a dot; all of Lightning's have one


def _nothing() -> _ResultMetric:
    """Return a result that has no value."""
    result = _ResultMetric(_Metadata(fx=_NOTHING, name=_NOTHING), is_tensor=True)
    result.has_reset = True
    return result


_EMPTY = _nothing()  # made once, so that a step makes no tensor for it


def path_of_log(key: LogKey) -> str:
    """Return the path of the merge rule for a logged name.

    It is the name, with a number from the second call in a micro-batch on.
    """
    _, name, occurrence = key
    return name if not occurrence else f"{name} (call {occurrence + 1})"


@contextmanager
def inside_hook(module: L.LightningModule, name: str) -> Iterator[None]:
    """Make `self.log` inside the block attribute values to the hook `name`, as `Trainer` does."""
    outer, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = outer
