"""One run of `training_step` and its backward pass over some rows: everything it makes is noted, and then undone."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_unified.training.exactness.draws import WatchPrecision
from lightning_unified.training.exactness.gradients import GradientSample, sample_gradients
from lightning_unified.training.exactness.written import Written, written_by
from lightning_unified.training.logs import Logged, LogRecorder, can_join, metrics_of, named_metrics
from lightning_unified.training.oom import is_out_of_memory
from lightning_unified.training.probe import Undone
from lightning_unified.training.snapshot import metric_state

__all__ = ["Run", "Runner"]

_FLOAT16_SCALE = 1024.0  # keeps float16 gradients off zero; taken out again, exactly, in float64


@dataclass(kw_only=True)
class Run:
    """What one run made.

    Args:
        rows: That ran.
        gradient: Samples of it.
        loss: Detached; None where the step gave none.
        extra: What the step returned besides.
        logs: What was logged, by hook, name and occurrence.
        metrics: The states of torchmetrics objects that were updated, empty before the run, by path.
        written: Buffers, frozen parameters and attributes that the step wrote, by path.
        formats: The floating-point formats computed in.
        generators: The states of Python's and numpy's global generators after the run.
        draws_on_host: Whether the run moved these generators.
    """

    rows: int
    gradient: GradientSample
    loss: Tensor | None
    extra: dict[str, Any]
    logs: dict[tuple[str, str, int], Logged]
    metrics: dict[str, dict[str, Any]]
    written: Written
    formats: set[torch.dtype]
    generators: tuple[Any, Any]
    draws_on_host: bool = field(default=False)


class Runner:
    """Runs a module's step aside.

    Args:
        trainer: In `fit`.
        step: Runs `training_step` as the loop does.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        step: Callable[["OrderedDict[str, Any]"], ClosureResult],
    ) -> None:
        self._trainer, self._step = trainer, step
        self._module = trainer.lightning_module
        self.keeps_autocast = False

    def run(
        self,
        kwargs: "OrderedDict[str, Any]",
        batch: Any,
        *,
        rows: int,
        draws: AbstractContextManager[Any],
        precision: WatchPrecision,
    ) -> Run:
        """Run the step on `batch` and differentiate its loss; everything is as before afterwards.

        Args:
            kwargs: Of `training_step`, the batch first.
            batch: What the step gets; its tensors are copied, as a step may write them in place.
            rows: Of it.
            draws: The mode that notes or replaces random draws.
            precision: What `draws` tells of formats.
        """
        trainer, logs = self._trainer, LogRecorder()
        own = apply_to_collection(batch, Tensor, _own)
        with ExitStack() as stack:
            stack.enter_context(Undone(trainer, metrics=metrics_of(self._module), in_eval=_is_batch_norm))
            stack.enter_context(logs.recording(trainer.fit_loop.epoch_loop._results))
            stack.enter_context(self._precise())
            for metric in metrics_of(self._module):
                metric.reset()
            before = _host_generators()
            look = stack.enter_context(written_by(trainer))
            with draws, torch.enable_grad():
                result = self._differentiated(kwargs, own)
            return Run(
                rows=rows,
                gradient=sample_gradients(self._parameters, scale=self._scale),
                loss=result.loss,
                extra=_kept(result.extra),
                logs=logs.logged,
                metrics=self._metrics(),
                written=look(),
                formats={*precision.dtypes, *self._formats},
                generators=_host_generators(),
                draws_on_host=_host_generators() != before,
            )

    def _differentiated(self, kwargs: "OrderedDict[str, Any]", batch: Any) -> ClosureResult:
        key = next(iter(kwargs))
        result = self._step(OrderedDict(kwargs, **{key: batch}))
        for parameter in self._parameters:  # as Lightning's zero_grad does after the step
            parameter.grad = None
        loss = result.closure_loss
        if loss is not None and loss.requires_grad:
            self._module.backward(loss * self._scale)
        result.closure_loss = None
        return result

    def failure(self, kwargs: "OrderedDict[str, Any]") -> BaseException | None:
        """Return the error that the step raises on the whole batch without gradients; None where it raises none, or memory runs out."""
        key, batch = next(iter(kwargs.items()))
        own = apply_to_collection(batch, Tensor, _own)
        with Undone(self._trainer, metrics=metrics_of(self._module), in_eval=_is_batch_norm), torch.no_grad():
            try:
                self._step(OrderedDict(kwargs, **{key: own}))
            except Exception as error:
                return None if is_out_of_memory(error) else error
        return None

    def _metrics(self) -> dict[str, dict[str, Any]]:
        """Return the states of metrics that were updated, and can be joined with those from before."""
        found = {path: metric for path, metric in named_metrics(self._module).items() if can_join(metric)}
        states = {path: metric_state(metric) for path, metric in found.items() if metric._update_count}
        return {path: {name: state[name] for name in found[path]._defaults} for path, state in states.items()}

    @property
    def _parameters(self) -> list[Tensor]:
        optimizers = self._trainer.strategy.optimizers
        of_optimizers = (one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"])
        both = {id(one): one for one in (*self._module.parameters(), *of_optimizers)}
        return [one for one in both.values() if one.requires_grad]

    def name_of(self, index: int) -> str:
        """Return the name of the parameter whose gradient has this index."""
        parameter = self._parameters[index]
        return next(
            (name for name, one in self._module.named_parameters() if one is parameter), "a parameter of the optimizer"
        )

    @property
    def _scale(self) -> float:
        return _FLOAT16_SCALE if any(one.dtype == torch.float16 for one in self._parameters) else 1.0

    @property
    def _formats(self) -> set[torch.dtype]:
        return {one.dtype for one in self._module.parameters() if one.is_floating_point()}

    @contextmanager
    def _precise(self) -> Iterator[None]:
        """Compute in the parameters' own format: without autocast, and without TF32."""
        strategy = self._trainer.strategy
        plugin = strategy._precision_plugin
        exact = isinstance(plugin, MixedPrecision) and not self.keeps_autocast
        with ExitStack() as undo:
            undo.enter_context(_without_tf32())
            if "torch._dynamo" in sys.modules:  # compiled code hides its random draws
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            if exact:
                undo.callback(setattr, strategy, "_precision_plugin", plugin)
                strategy._precision_plugin = Precision()
            yield


@contextmanager
def _without_tf32() -> Iterator[None]:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # pyright: ignore[reportAttributeAccessIssue]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def _is_batch_norm(child: nn.Module) -> bool:
    """Return whether `child` mixes rows by its mode: it runs in eval mode in a check, where its statistics were accepted as they are."""
    return isinstance(child, _BatchNorm)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _kept(extra: Any) -> Any:
    return apply_to_collection(extra, Tensor, lambda tensor: tensor.detach())


def _host_generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])
