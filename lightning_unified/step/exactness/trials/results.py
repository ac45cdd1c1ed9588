"""Undo the run of a step, and gather its outputs, logs, metrics and written state."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torchmetrics import Metric

from lightning_unified.nn.module_tree.walks import named_modules_of, tensors_of
from lightning_unified.nn.second_run.generators import numpy_state, python_state
from lightning_unified.step.exactness.draws.replay import DrawMode
from lightning_unified.step.exactness.parameters.formats import reduced_formats
from lightning_unified.step.recovery.renormed import RenormedRows
from lightning_unified.step.recovery.undone_run import Undone
from lightning_unified.step.results.logs import Logged, LogKey, LogRecorder, path_of_log
from lightning_unified.step.results.metrics import ComputeRecord, UpdateRecord, can_join, metric_state
from lightning_unified.step.results.sameness import same
from lightning_unified.step.results.silent_loggers import STAND_INS, say_direct_logs
from lightning_unified.step.results.state.writes import Written, written_since
from lightning_unified.step.split.containers import entries_of, with_entries
from lightning_unified.step.undo import Noted, StateWatch

__all__ = ["Aside", "Results", "aside", "copied", "is_batch_norm"]

_JOINED = 1e-4  # relative; a state that does not add up differs by far more


def is_batch_norm(child: nn.Module) -> bool:
    """Return whether `child` is a BatchNorm layer, whose statistics mix rows in train mode.

    A check runs these layers in eval mode, because the user has accepted their statistics per micro-batch.
    """
    return isinstance(child, _BatchNorm)


@dataclass(kw_only=True)
class Results:
    """The outputs, logs, metrics and written state of one run of a step.

    Args:
        returned: The output of the step; of a training step, its entries besides the loss.
        logs: The logged values, by hook, name and occurrence.
        metrics: The states of updated torchmetrics objects, by path; they were empty before the run.
        reductions: The reductions of their states that the metrics declare, by path.
        joins: For torchmetrics objects without `full_state_update=False`: whether their states add up over batches, by path.
        logged_metrics: The paths of logged torchmetrics objects, by the path of the log.
        logged_totals: The names of logs whose value a torchmetrics object computed over all batches so far.
        written: The buffers, frozen parameters and attributes that the step wrote, by path.
        generators: The states of Python's and NumPy's global generators after the run.
        draws_on_host: Whether the run changed the states of these generators.
        formats: The floating-point formats of the run: of 16-bit results, of the parameters and of a reduction.
    """

    returned: Any
    logs: dict[LogKey, Logged]
    metrics: dict[str, dict[str, Any]]
    reductions: dict[str, Mapping[str, Any]]
    joins: dict[str, bool]
    logged_metrics: dict[str, str]
    logged_totals: set[str]
    written: Written
    generators: tuple[Any, Any]
    draws_on_host: bool
    formats: set[torch.dtype]


@dataclass(frozen=True, slots=True)
class Aside:
    """A run of a step that is undone at the end of its block.

    Args:
        gather: Takes the step's output, and returns all results of the run.
        noted: The state from before the run.
    """

    gather: Callable[[Any], Results]
    noted: Noted


@contextmanager
def aside(
    trainer: L.Trainer,
    results: _ResultCollection | None,
    draws: DrawMode,
    *,
    in_eval: Callable[[nn.Module], bool] = is_batch_norm,
    state: StateWatch | None = None,
    renormed: RenormedRows | None = None,
) -> Iterator[Aside]:
    """Undo a step that runs inside the block.

    Args:
        trainer: The Trainer that runs the step.
        results: Lightning's collection of logged values.
        draws: The draw mode in which the step runs; it records the formats of results.
        in_eval: Returns whether a child of the module is in eval mode inside the block.
        state: The watch over the state that the step may change; None for a new one.
        renormed: Keeps the rows of embeddings that the step scales in place; None for a new one.
    """
    module, logs = trainer.lightning_module, LogRecorder()
    with ExitStack() as stack:
        undone = stack.enter_context(Undone(trainer, in_eval=in_eval, state=state, renormed=renormed))
        stack.enter_context(logs.recording(results))
        metrics = undone.metrics
        for metric in metrics.values():
            metric.reset()
        records = {path: UpdateRecord(metric) for path, metric in metrics.items() if not can_join(metric)}
        for record in records.values():
            stack.enter_context(record.watching())
        asked = ComputeRecord(metrics.values())
        stack.enter_context(asked.watching())
        wrappers = _wrappers_of(module)
        for wrapper in wrappers.values():
            stack.callback(setattr, wrapper, "_forward_cache", wrapper._forward_cache)
            wrapper._forward_cache = None
        before = _host_generators()

        def gather(returned: Any) -> Results:
            after = _host_generators()
            written = written_since(undone.noted)
            written.pop(STAND_INS, None)
            if any(one.kind == "entry" for one in written.values()):
                undone.look()  # the step may have created metrics
            return Results(
                returned=apply_to_collection(returned, Tensor, Tensor.detach),
                logs=logs.logged,
                metrics=_states_of(undone.metrics),
                reductions={path: metric._reductions for path, metric in undone.metrics.items()},
                joins={
                    **dict.fromkeys(_changed_otherwise(undone.metrics, wrappers), False),
                    **{path: one.adds_up(tolerance=_JOINED) for path, one in records.items() if one.has_calls},
                },
                logged_metrics=_paths_of_logged(logs.logged, undone.metrics),
                logged_totals=_logged_totals(logs.logged, asked),
                written=written,
                generators=after,
                draws_on_host=after != before,
                formats={
                    *draws.formats,
                    *reduced_formats(module),
                    *(one.dtype for one in tensors_of(module)[0] if one.is_floating_point()),
                },
            )

        yield Aside(gather, undone.noted)
        if undone.writes_logs:
            say_direct_logs(trainer)


def copied(batch: Any) -> Any:
    """Return a copy of a batch with its tensors copied, because a step may write them in place."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, PackedSequence):
        return type(batch)(*map(copied, batch))
    entries = entries_of(batch)
    if entries is None:
        clone = getattr(batch, "clone", None)  # graph batches of torch_geometric have `clone`
        return clone() if callable(clone) else batch
    return with_entries(batch, [(name, copied(entry)) for name, entry in entries])


def _states_of(metrics: Mapping[str, Metric]) -> dict[str, dict[str, Any]]:
    """Return the states of updated metrics, by path."""
    states = {path: metric_state(metric) for path, metric in metrics.items() if metric._update_count}
    return {path: {name: state[name] for name in metrics[path]._defaults} for path, state in states.items()}


def _wrappers_of(module: nn.Module) -> dict[str, Metric]:
    """Return the torchmetrics objects without a state of their own, by path."""
    name = type(module).__name__
    found = ((path, child) for path, child in named_modules_of(module).items() if isinstance(child, Metric))
    return {f"{name}.{path}": child for path, child in found if not child._defaults}


def _changed_otherwise(metrics: Mapping[str, Metric], wrappers: Mapping[str, Metric]) -> list[str]:
    """Return the paths of torchmetrics objects that a run has changed past their update.

    That does not add up over micro-batches. A window (`RunningMean`) writes its state without an update, and a wrapper such as `MinMaxMetric` keeps figures of each call outside of its
    state.
    """
    windows = [path for path, metric in metrics.items() if not metric._update_count and _has_state(metric)]
    return [*windows, *(path for path, wrapper in wrappers.items() if wrapper._forward_cache is not None)]


def _has_state(metric: Metric) -> bool:
    """Return whether a state differs from that of an empty metric."""
    return any(not same(getattr(metric, name), empty) for name, empty in metric._defaults.items())


def _paths_of_logged(logged: Mapping[LogKey, Logged], metrics: Mapping[str, Metric]) -> dict[str, str]:
    by_identity = {id(metric): path for path, metric in metrics.items()}
    values = {path_of_log(key): call.values[-1] for key, call in logged.items()}
    return {name: by_identity[id(value)] for name, value in values.items() if id(value) in by_identity}


def _logged_totals(logged: Mapping[LogKey, Logged], asked: ComputeRecord) -> set[str]:
    """Return the names of logs whose value a metric computed over all batches so far."""
    values = {path_of_log(key): call.values[-1] for key, call in logged.items()}
    return {name for name, value in values.items() if isinstance(value, Tensor) and asked.has(value)}


def _host_generators() -> tuple[Any, Any]:
    state = numpy_state()
    return python_state(), (state[0], state[1].tobytes(), *state[2:])
