"""The results of a split batch, merged by the rules of the exactness check.

These are outputs, logs, metrics and written state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torchmetrics import Metric

from lightning_unified.errors import SplitError
from lightning_unified.step.exactness.facts.levels import name_of
from lightning_unified.step.exactness.tables import Tables
from lightning_unified.step.results.by_shape import merge
from lightning_unified.step.results.logs import Logged, LogKey, LogRecorder, path_of_log
from lightning_unified.step.results.merging import MergeTable, MicroBatchWeights, merged
from lightning_unified.step.results.metrics import MetricsOverMicroBatches
from lightning_unified.step.results.of_summands import AS_LOSS
from lightning_unified.step.results.state.written import WrittenOverMicroBatches
from lightning_unified.step.results.trees import all_values, merge_tree, undecided_paths
from lightning_unified.step.undo import StateWatch

__all__ = ["SplitResults"]


class SplitResults:
    """Merges micro-batches' outputs, logs and metrics by the rules of the exactness check.

    Args:
        tables: The rules.
        results: Lightning's collection of logged values; None where nothing can be logged.
        metrics: The module's torchmetrics objects, by path.
        state: The watch over state that the step may write; None where nothing is checked, so that no rule can be
            known.
        ignored: Prefixes of paths that the user allows a split batch to write once a micro-batch.
        learn: `learn(table, paths, decides)` checks the batch if the rules of `table` do not tell how the values at `paths` merge;
            `decides(path)` tells whether they do. It is called without paths too: another process of the group may have some.
    """

    def __init__(
        self,
        tables: Tables,
        *,
        results: _ResultCollection | None,
        metrics: Mapping[str, Metric],
        state: StateWatch | None,
        ignored: tuple[str, ...],
        learn: Callable[[MergeTable, Sequence[str], Callable[[str], bool]], None],
    ) -> None:
        self._tables, self._results, self._learn, self._state = tables, results, learn, state
        self._ignored = ignored
        self._all_metrics = dict(metrics)
        self.begin()

    def begin(self) -> None:
        """Start over: some optimizers run their closure, and so the batch, several times a step."""
        self._logs, self._is_settled = LogRecorder(), False
        self._metrics = MetricsOverMicroBatches(self._all_metrics, self._tables.metrics, self._tables.joins)
        self._written: WrittenOverMicroBatches | None = None
        if self._state is not None:
            self._written = WrittenOverMicroBatches(
                self._state, self._tables.written, self._learn, ignored=self._ignored
            )

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Record the logs and metric updates of micro-batch `index` inside the block."""
        self._logs.next_micro_batch(index)
        if self._written is not None:
            self._written.begin_micro_batch()
        with self.recording(), self._metrics.watching():
            yield

    def end_micro_batch(self) -> None:
        """Record the state that a micro-batch's step wrote, before the hooks that run once a batch."""
        if self._written is not None:
            self._written.end_micro_batch()

    def begin_backward(self) -> None:
        """Restore the state that a micro-batch's step wrote, if it was merged before the backward pass."""
        if self._written is not None:
            self._written.begin_backward()

    def end_backward(self) -> None:
        """Record the state that a micro-batch's backward pass wrote."""
        if self._written is not None:
            self._written.end_backward()

    def keeping(self) -> Sequence[Tensor]:
        """Return the tensors in written state that await a gradient, after the step of a micro-batch."""
        return () if self._written is None else self._written.keeping()

    def numbers(self, index: int, returned: Any) -> dict[str, Tensor]:
        """Return the logged and returned numbers of micro-batch `index`, for facts about levels."""
        tables = self._tables
        calls = [(path_of_log(key), call) for key, call in self._logs.logged.items()]
        found = [
            (f"log {path}", tables.logs.all_rules(path) | tables.sized_logs.all_rules(path), call.values[-1])
            for path, call in calls
            if call.micro_batches[-1] == index
        ]
        outputs = all_values(tables.outputs, [returned])
        found += [(f"output {path}", tables.outputs.all_rules(path), value) for path, (value,) in outputs]
        return {
            name_of(path, rules): value
            for path, rules, value in found
            if rules and isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
        }

    def written_numbers(self) -> dict[str, list[Any]]:
        """Return the numbers that all micro-batches have written, for facts about their levels."""
        written = {} if self._written is None or self._is_settled else self._written.numbers()
        rules = self._tables.written.all_rules
        return {name_of(f"written {path}", rules(path)): values for path, values in written.items()}

    def state_before(self) -> AbstractContextManager[None]:
        """Restore the state from before the batch inside the block, after its last micro-batch."""
        return nullcontext() if self._written is None or self._is_settled else self._written.state_before()

    def settle(self, weights: MicroBatchWeights) -> None:
        """Write the merged state, metrics and logs once; a later call adds only gradients that are written since."""
        if self._is_settled:
            if self._written is not None:
                self._written.finish_gradients(weights)
            return
        self._is_settled = True
        calls = {path_of_log(key): call for key, call in self._logs.logged.items() if _is_value_of_step(key, call)}

        def decides(path: str) -> bool:
            return self._decides(path, calls[path], weights)

        due = [path for path in calls if not decides(path) or self._is_thin(path, calls[path])]
        self._learn(self._tables.logs, due, decides)
        self._metrics.finish(weights)
        if self._written is not None:
            self._written.finish(weights)
        self._flush(weights, by_steps=True)

    def _flush(self, weights: MicroBatchWeights, *, by_steps: bool) -> None:
        if self._results is not None:
            self._logs.flush(self._results, lambda key, call: self._whole_log(key, call, weights), by_steps=by_steps)

    def recording(self) -> AbstractContextManager[None]:
        """Hold back the values that are logged inside the block."""
        return self._logs.recording(self._results)

    def finish(self, values: Sequence[Any], weights: MicroBatchWeights) -> Any:
        """Return the whole batch's output, write its logs, and merge metrics."""
        tables = self._tables

        def decides(path: str) -> bool:
            return path not in undecided_paths(tables.outputs, values, weights)

        self._learn(tables.outputs, undecided_paths(tables.outputs, values, weights), decides)
        self.settle(weights)
        self._flush(weights, by_steps=False)

        def by_shape(_path: str, values: Sequence[Any]) -> Any:
            return merge(values, sizes=weights.rows, average=partial(merged, "mean", weights=weights))

        return merge_tree(tables.outputs, values, weights, fallback=by_shape)

    def undecided(self, weights: MicroBatchWeights) -> set[str]:
        """Return the names of logs for which several means fit all checks, and differ here."""
        calls = [(path_of_log(key), call) for key, call in self._logs.logged.items()]
        return {
            path for path, call in calls if _differ(_weights_that_fit(self._tables, path, *_weights_of(call, weights)))
        }

    def _decides(self, path: str, call: Logged, weights: MicroBatchWeights) -> bool:
        """Return whether the rules tell how a logged value merges."""
        tables, declared = self._tables.logs, _declared(call)
        if declared in tables.all_rules(path):
            return True  # `reduce_fx` decides between rules that fit so far
        return tables.decides(path, call.values, _weights_of(call, weights)[0])

    def _is_thin(self, path: str, call: Logged) -> bool:
        rules = self._tables.logs.all_rules(path)
        return _declared(call) not in rules and self._tables.is_thin(path, call.values)

    def _whole_log(self, key: LogKey, call: Logged, weights: MicroBatchWeights) -> tuple[Any, Any]:
        """Return a logged value of the whole batch, and its `batch_size`."""
        path, tables = path_of_log(key), self._tables
        if isinstance(call.values[0], Metric):
            return call.values[-1], call.batch_sizes[-1]
        own, by_size = _weights_of(call, weights)
        batch_size = None
        if by_size is not None:
            rule = tables.logs.rule(f"batch_size of {path}")
            batch_size = call.batch_sizes[0] if rule == "equal" else sum(call.batch_sizes)
        values = [value.float() if value.dtype in (torch.float16, torch.bfloat16) else value for value in call.values]
        return self._value(path, values, own, by_size, call), batch_size

    def _value(
        self,
        path: str,
        values: list[Tensor],
        weights: MicroBatchWeights,
        by_size: MicroBatchWeights | None,
        call: Logged,
    ) -> Any:
        tables = self._tables
        rule, declared = tables.logs.rule(path), _declared(call)
        if declared in tables.logs.all_rules(path):
            rule = declared  # of several rules that fit so far
        if (
            weights.summands and rule is None and not tables.logs.knows(path)
        ):  # a hook logs it, such as `on_before_backward`
            rule = AS_LOSS
        try:
            is_given = path in tables.logs.given
            if by_size is not None and not is_given and rule != "equal" and tables.sized_logs.rule(path) == "mean":
                return merged("mean", values, by_size)
            if rule is not None:
                return merged(rule, values, weights)
        except SplitError:
            tables.logs.reject(path)
        return _as_reduced(call, values, by_size or weights)


def _is_value_of_step(key: LogKey, call: Logged) -> bool:
    """Return whether the step itself logged the value; hooks and metrics log others."""
    return isinstance(call.values[0], Tensor) and key[0].endswith("_step")


def _weights_of(call: Logged, weights: MicroBatchWeights) -> tuple[MicroBatchWeights, MicroBatchWeights | None]:
    """Return the weights of the micro-batches that logged a value, and those by its `batch_size`."""
    own = weights.of(call.micro_batches)
    if any(size is None for size in call.batch_sizes):
        return own, None
    return own, MicroBatchWeights(own.rows, [float(size) for size in call.batch_sizes])


def _weights_that_fit(
    tables: Tables, path: str, weights: MicroBatchWeights, by_size: MicroBatchWeights | None
) -> list[Sequence[float]]:
    """Return the weights of each mean that fits all checks of a logged value."""
    rules = tables.logs.all_rules(path)
    if "equal" in rules or path in tables.logs.given:
        return []
    fit = [one for rule, one in (("mean", weights.terms), ("mean of rows", weights.rows)) if rule in rules]
    is_sized = by_size is not None and "mean" in tables.sized_logs.all_rules(path)
    return [*fit, by_size.terms] if is_sized and by_size is not None else fit


def _differ(several: Sequence[Sequence[float]]) -> bool:
    """Return whether weights differ by more than a factor."""
    shares = [[one / (sum(weights) or 1) for one in weights] for weights in several]
    return any(abs(one - first) > 1e-6 for other in shares[1:] for one, first in zip(other, shares[0], strict=True))


def _as_reduced(call: Logged, values: list[Tensor], weights: MicroBatchWeights) -> Any:
    """Merge a logged value without a rule as its `reduce_fx` reduces steps."""
    return merged(_declared(call) or "mean", values, weights)


def _declared(call: Logged) -> str | None:
    """Return the rule that `reduce_fx` declares; None for a mean, the default."""
    reduce_fx = call.options.get("reduce_fx", "mean")
    how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    return {"sum": "sum", "max": "max", "amax": "max", "min": "min", "amin": "min"}.get(how)
