"""Run `training_step` and backward on some rows, record all results, and undo the run."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torchmetrics import Metric

from lightning_unified.step.exactness.draws.replay import DrawMode, NoDraws, WatchPrecision
from lightning_unified.step.exactness.facts.progress import Counters, WatchedIndex
from lightning_unified.step.exactness.gradients import GradientSample, sample_gradients
from lightning_unified.step.recovery.oom import is_out_of_memory
from lightning_unified.step.recovery.undone_run import Undone, draws_or_mixes, parameters_of_step, state_of_step
from lightning_unified.step.results.logs import Logged, LogKey, LogRecorder, inside_hook, path_of_log
from lightning_unified.step.results.metrics import ComputeRecord, UpdateRecord, can_join, metric_state
from lightning_unified.step.results.silent_loggers import say_direct_logs
from lightning_unified.step.results.written import Written, written_since
from lightning_unified.step.split.containers import entries_of, with_entries
from lightning_unified.step.undo import StateWatch

__all__ = ["Results", "Run", "Runner", "aside", "copied"]

_JOINED = 1e-4  # relative; a state that does not add up differs by far more
_FLOAT16_SCALE = 1024.0  # keeps float16 gradients from underflow; divided out again, exactly, in float64


def is_batch_norm(child: nn.Module) -> bool:
    """Return whether `child` is a BatchNorm layer, whose statistics mix rows in train mode.

    A check runs these layers in eval mode, because the user has accepted their statistics per micro-batch.
    """
    return isinstance(child, _BatchNorm)


@dataclass(kw_only=True)
class Results:
    """The outputs, logs, metrics and written state of one run of a step.

    Args:
        rows: The number of rows that ran.
        returned: The output of the step; of a training step, its entries besides the loss.
        logs: The logged values, by hook, name and occurrence.
        metrics: The states of updated torchmetrics objects, by path; they were empty before the run.
        joins: For torchmetrics objects without `full_state_update=False`: whether their states add up over batches, by path.
        logged_metrics: The paths of logged torchmetrics objects, by the path of the log.
        logged_totals: The names of logs whose value a torchmetrics object computed over all batches so far.
        written: The buffers, frozen parameters and attributes that the step wrote, by path.
        generators: The states of Python's and NumPy's global generators after the run.
        draws_on_host: Whether the run changed the states of these generators.
        formats: The floating-point formats of the run: of 16-bit results and of the parameters.
    """

    rows: int
    returned: Any
    logs: dict[LogKey, Logged]
    metrics: dict[str, dict[str, Any]]
    joins: dict[str, bool]
    logged_metrics: dict[str, str]
    logged_totals: set[str]
    written: Written
    generators: tuple[Any, Any]
    draws_on_host: bool
    formats: set[torch.dtype]


@dataclass(kw_only=True)
class Run(Results):
    """The gradient and results of one run of `training_step` and its backward pass.

    Args:
        gradient: Samples of the gradient.
        loss: The loss, detached; None if the step returned none.
    """

    gradient: GradientSample
    loss: Tensor | None


@contextmanager
def aside(
    trainer: L.Trainer,
    results: _ResultCollection | None,
    precision: WatchPrecision,
    *,
    in_eval: Callable[[nn.Module], bool] = is_batch_norm,
    state: StateWatch | None = None,
) -> Iterator[Callable[[int, Any], Results]]:
    """Undo a step that runs inside the block; yield a function that gathers its results.

    The function takes the number of rows and the output of the step.

    Args:
        trainer: The Trainer that runs the step.
        results: Lightning's collection of logged values.
        precision: The formats that a draw mode has recorded.
        in_eval: Returns whether a child of the module is in eval mode inside the block.
        state: The watch over the state that the step may change; None for a new one.
    """
    module, logs = trainer.lightning_module, LogRecorder()
    with ExitStack() as stack:
        undone = stack.enter_context(Undone(trainer, in_eval=in_eval, state=state))
        stack.enter_context(logs.recording(results))
        metrics = undone.metrics
        for metric in metrics.values():
            metric.reset()
        records = {path: UpdateRecord(metric) for path, metric in metrics.items() if not can_join(metric)}
        for record in records.values():
            stack.enter_context(record.watching())
        asked = ComputeRecord(metrics.values())
        stack.enter_context(asked.watching())
        before = _host_generators()

        def gather(rows: int, returned: Any) -> Results:
            after = _host_generators()
            written = written_since(undone.noted)
            if any(one.kind == "entry" for one in written.values()):
                undone.look()  # the step may have created metrics
            return Results(
                rows=rows,
                returned=apply_to_collection(returned, Tensor, Tensor.detach),
                logs=logs.logged,
                metrics=_states_of(undone.metrics),
                joins={path: record.adds_up(tolerance=_JOINED) for path, record in records.items()},
                logged_metrics=_paths_of_logged(logs.logged, undone.metrics),
                logged_totals=_logged_totals(logs.logged, asked),
                written=written,
                generators=after,
                draws_on_host=after != before,
                formats={*precision.dtypes, *(one.dtype for one in module.parameters() if one.is_floating_point())},
            )

        yield gather
        if undone.writes_logs:
            say_direct_logs(trainer)


class Runner:
    """Runs a module's step and undoes it.

    Args:
        trainer: The Trainer, in `fit`.
        step: Runs `training_step` as the loop does.

    Attributes:
        keeps_autocast: Whether the step runs with autocast, because it fails without it.
        draws_in_eval: Whether the step draws random numbers even with its dropout layers in eval mode.
        counters: The counters of the run's progress that the step reads.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        step: Callable[["OrderedDict[str, Any]"], ClosureResult],
    ) -> None:
        self._trainer, self._step = trainer, step
        self._module = trainer.lightning_module
        self.keeps_autocast = self.draws_in_eval = False
        self.counters = Counters()
        self._sampled: list[Tensor] = []
        self._state = state_of_step(trainer)

    @property
    def module(self) -> L.LightningModule:
        """The module whose step runs."""
        return self._module

    @property
    def has_dropout(self) -> bool:
        """Whether a layer of the module, in train mode, applies dropout."""
        return any(draws_or_mixes(one) and not is_batch_norm(one) and one.training for one in self._module.modules())

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self._trainer.strategy.root_device

    def release(self) -> None:
        """Drop the copies of state that runs have made."""
        self._state.release()

    def run(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        *,
        rows: int,
        draws: DrawMode,
        precision: WatchPrecision,
    ) -> Run:
        """Run the step on `batch`, run the backward pass of its loss, and undo both.

        Args:
            kwargs: The arguments of `training_step`, the batch first.
            batch: The batch for the step. Its tensors are copied, because a step may write them in place.
            rows: The number of rows of `batch`.
            draws: The mode that records or replaces random draws.
            precision: The formats that `draws` records.
        """
        results = self._trainer.fit_loop.epoch_loop._results
        own = copied(batch)
        in_eval = draws_or_mixes if isinstance(draws, NoDraws) else is_batch_norm
        with self._precise(), aside(self._trainer, results, precision, in_eval=in_eval, state=self._state) as gather:
            parameters = parameters_of_step(self._trainer)
            scale = _FLOAT16_SCALE if any(one.dtype == torch.float16 for one in parameters) else 1.0
            with torch.enable_grad():
                result = self._differentiated(kwargs, own, draws, parameters, scale=scale)
            self._sampled = [one for one in parameters if one.requires_grad]  # the step may have frozen some
            gradient = sample_gradients(self._sampled, scale=scale)
            return Run(gradient=gradient, loss=result.loss, **vars(gather(rows, result.extra)))

    def _differentiated(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        draws: DrawMode,
        parameters: Sequence[Tensor],
        *,
        scale: float,
    ) -> ClosureResult:
        key = next(iter(kwargs))
        own = OrderedDict(kwargs, **{key: batch})
        if "batch_idx" in own:
            own["batch_idx"] = WatchedIndex(own["batch_idx"], self.counters)
        with draws, self.counters.watching():
            result = self._step(own)
        for parameter in parameters:  # as Lightning's zero_grad, between the step and the backward pass
            parameter.grad = None
        loss = result.closure_loss
        if loss is not None and loss.requires_grad:
            with draws if draws.covers_backward else nullcontext(), inside_hook(self._module, "backward"):
                self._module.backward(loss * scale)
        result.closure_loss = None
        return result

    def failure(self, kwargs: "OrderedDict[str, Any]") -> BaseException | None:
        """Return the error of the step on the whole batch without gradients; None without one.

        None also if memory runs out.
        """
        key, batch = next(iter(kwargs.items()))
        own = copied(batch)
        with Undone(self._trainer, in_eval=is_batch_norm), torch.no_grad():
            try:
                self._step(OrderedDict(kwargs, **{key: own}))
            except Exception as error:
                return None if is_out_of_memory(error) else error
        return None

    def name_of(self, index: int) -> str:
        """Return the name of the parameter whose gradient has the given index."""
        parameter = self._sampled[index]
        return next(
            (name for name, one in self._module.named_parameters() if one is parameter), "a parameter of the optimizer"
        )

    @property
    def leaves_out_autocast(self) -> bool:
        """Whether the check runs the step without autocast, although it trains with autocast."""
        return isinstance(self._trainer.strategy._precision_plugin, MixedPrecision) and not self.keeps_autocast

    @contextmanager
    def _precise(self) -> Iterator[None]:
        """Compute in the parameters' own format: without autocast, and without TF32."""
        strategy = self._trainer.strategy
        plugin = strategy._precision_plugin
        with ExitStack() as undo:
            undo.enter_context(_without_tf32())
            if "torch._dynamo" in sys.modules:  # compiled code hides random draws from the mode
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            if self.leaves_out_autocast:
                undo.callback(setattr, strategy, "_precision_plugin", plugin)
                strategy._precision_plugin = Precision()
            yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute float32 in float32 inside the block.

    torch 2.13 has two switches for each kind of operator. While they contradict each other, reading the older one raises an error.
    `torch.backends.cudnn.flags` reads it, for instance in CTC losses. So this block sets the older switches too, if they can be read.
    """
    cudnn: Any = torch.backends.cudnn
    places = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    with ExitStack() as undo:
        for place in places:
            undo.callback(setattr, place, "fp32_precision", place.fp32_precision)
        with suppress(RuntimeError):
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        with suppress(RuntimeError):
            undo.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            cudnn.allow_tf32 = False
        for place in places:
            if place.fp32_precision == "tf32":
                place.fp32_precision = "ieee"
        yield


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


def _paths_of_logged(logged: Mapping[LogKey, Logged], metrics: Mapping[str, Metric]) -> dict[str, str]:
    by_identity = {id(metric): path for path, metric in metrics.items()}
    values = {path_of_log(key): call.values[-1] for key, call in logged.items()}
    return {name: by_identity[id(value)] for name, value in values.items() if id(value) in by_identity}


def _logged_totals(logged: Mapping[LogKey, Logged], asked: ComputeRecord) -> set[str]:
    """Return the names of logs whose value a metric computed over all batches so far."""
    values = {path_of_log(key): call.values[-1] for key, call in logged.items()}
    return {name for name, value in values.items() if isinstance(value, Tensor) and asked.has(value)}


def _host_generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])
