"""Run `training_step` outside the training loop, and undo everything it changed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Self

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchmetrics import Metric

from lightning_unified.nn.cuda_graphs import eager_calls
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.renormed import RenormedRows
from lightning_unified.step.recovery.snapshot import StepSnapshot
from lightning_unified.step.results.logs import LogRecorder, inside_hook
from lightning_unified.step.results.silent_loggers import SilentLoggers
from lightning_unified.step.undo import TRAINING_STEP, Noted, StateWatch, roots_of

__all__ = [
    "Undone",
    "draws_or_mixes",
    "gradient_of_step",
    "only_drops",
    "owns_dropout",
    "parameters_of_optimizers",
    "parameters_of_step",
    "state_of_step",
]

_ENTRIES = 16384  # entries of each parameter's gradient that are compared: enough to find a difference, few to keep
_FLOAT16_SCALE = 1024.0  # keeps float16 gradients from underflow; divided out again, exactly, in float64


class Undone:
    """Run a module on copies of a batch, then restore all state that a step may change.

    Inside the block, dropout is off and BatchNorm uses running statistics. Logged values are dropped, loggers write
    nothing, and CUDA graphs are not replayed. Parameters start without gradients. Attention does not use cuDNN, which
    would build kernels for a few rows and others for a real batch, at a second or more each.

    Args:
        trainer: A Trainer in `fit`.
        in_eval: Returns whether a child module is in eval mode inside; by default `draws_or_mixes`. Use `owns_dropout`
            if the gradient is still random.
        state: A watch that earlier blocks used for the same Trainer; None for a new one.
        renormed: Keeps the rows of embeddings that the step scales in place; None for a new one.

    Raises:
        RunError: At the end of the block, if a step wrote a tensor that cannot be restored.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        in_eval: Callable[[nn.Module], bool] | None = None,
        state: StateWatch | None = None,
        renormed: RenormedRows | None = None,
    ) -> None:
        self._trainer, self._in_eval = trainer, in_eval or draws_or_mixes
        self._module = trainer.lightning_module
        self._state, self._renormed = state or state_of_step(trainer), renormed or RenormedRows()
        self._results = trainer.fit_loop.epoch_loop._results

    def __enter__(self) -> Self:
        trainer, module = self._trainer, self._module
        self._snapshot = StepSnapshot(
            trainer,
            state=self._state,
            generators=GeneratorWatch(trainer.strategy.root_device),
            results=self._results,
            batch=None,
        )
        children = modules_of(module)
        parameters = _parameters(trainer, children)  # frozen ones too: a step may train them, and freeze others
        self._gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
        known = {*map(id, parameters)}
        leaves = [leaf for leaf in self._snapshot.state.leaves if id(leaf) not in known]
        own = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]  # a step may read these
        # nothing is changed above, where memory may run out
        self._kernels = ExitStack()
        self._kernels.enter_context(_attention_without_cudnn())
        self._kernels.enter_context(eager_calls())
        self._kernels.enter_context(self._renormed)
        self._loggers = self._kernels.enter_context(SilentLoggers(trainer))
        self._logs = LogRecorder().recording(self._results)
        self._logs.__enter__()
        for parameter, _, _ in self._gradients:
            parameter.grad = None
        for leaf, gradient in zip(leaves, own, strict=True):
            self._gradients.append((leaf, leaf.grad, leaf.requires_grad))
            leaf.grad = gradient
        for child in children:
            if child.training and self._in_eval(child):
                child.training = False
        return self

    @property
    def metrics(self) -> dict[str, Metric]:
        """The torchmetrics objects that a step may update, by path, as of the last look."""
        return self._state.named_metrics

    def look(self) -> None:
        """Find the state that a step has created inside the block."""
        self._state.look()

    @property
    def writes_logs(self) -> bool:
        """Whether a step has called a logger directly, without `self.log`."""
        return self._loggers.is_asked

    @property
    def noted(self) -> Noted:
        """The state at the beginning of the block."""
        return self._snapshot.state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._logs.__exit__(None, None, None)
        self._kernels.close()
        for parameter, gradient, is_trained in self._gradients:
            parameter.grad = gradient
            if parameter.requires_grad != is_trained:
                parameter.requires_grad_(is_trained)
        self._renormed.restore()
        self._snapshot.restore()


def state_of_step(trainer: L.Trainer) -> StateWatch:
    """Return a watch over all state that a training step may change."""
    return StateWatch(partial(roots_of, trainer.lightning_module, trainer, TRAINING_STEP))


@contextmanager
def _attention_without_cudnn() -> Iterator[None]:
    """Disable cuDNN's scaled dot product attention if one of torch's other kernels is allowed."""
    kernels = torch.backends.cuda
    others = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()
    before = kernels.cudnn_sdp_enabled()
    kernels.enable_cudnn_sdp(before and not others)
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(before)


def gradient_of_step(
    trainer: L.Trainer, step: Callable[[], ClosureResult], *, parameters: Sequence[Tensor] | None = None
) -> Tensor:
    """Run one step and its backward; return entries of its gradient as float64 on the host.

    Every call returns the same entries. Hooks around the backward pass are not run, and no gradient is left behind. A
    step without a loss has a gradient of zeros.

    The gradient is that of `parameters`, by default of all that are trained.
    """
    if parameters is None:
        parameters = [parameter for parameter in parameters_of_step(trainer) if parameter.requires_grad]
    scale = _FLOAT16_SCALE if str(trainer.precision_plugin.precision).startswith("16") else 1.0
    with torch.enable_grad():
        loss = step().closure_loss
        if loss is not None and loss.requires_grad:
            with inside_hook(trainer.lightning_module, "backward"):
                trainer.lightning_module.backward(loss * scale)
    samples = [_sample(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return torch.cat(samples).cpu().double() / scale if samples else torch.zeros(1, dtype=torch.float64)


def _sample(parameter: Tensor) -> Tensor:
    stride = parameter.numel() // _ENTRIES | 1  # odd: an even stride would skip columns of a matrix of even width
    if parameter.grad is None:
        return parameter.detach().new_zeros(-(-parameter.numel() // stride))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().flatten()[::stride].clone()


def parameters_of_step(trainer: L.Trainer) -> list[Tensor]:
    """Return the parameters of the module and of the optimizers, each once.

    Frozen ones are included, because a step may train them. Shards that an optimizer holds are left out: the module's parameters are the
    whole ones that a step computes with.
    """
    return _parameters(trainer, modules_of(trainer.lightning_module))


def parameters_of_optimizers(trainer: L.Trainer) -> list[Tensor]:
    """Return the parameters that the optimizers hold."""
    groups = (group["params"] for optimizer in trainer.strategy.optimizers for group in optimizer.param_groups)
    return [*chain.from_iterable(groups)]


def _parameters(trainer: L.Trainer, children: Iterable[nn.Module]) -> list[Tensor]:
    owned = (child._parameters.values() for child in children)
    written = (one for one in parameters_of_optimizers(trainer) if not isinstance(one, DTensor))
    both = (one for one in chain(chain.from_iterable(owned), written) if one is not None)
    return list({id(parameter): parameter for parameter in both}.values())


def draws_or_mixes(child: nn.Module) -> bool:
    """Return whether `child` drops out or mixes rows in train mode.

    A recurrent layer stays in train mode: cuDNN's has no backward pass in eval mode.
    """
    if isinstance(child, (_DropoutNd, _BatchNorm)):
        return True
    drops = (name for name, value in vars(child).items() if "drop" in name and isinstance(value, float) and value > 0)
    return not isinstance(child, nn.RNNBase) and any(drops)


def only_drops(child: nn.Module) -> bool:
    """Return whether the mode of a child that drops out changes nothing else.

    So it is with torch's own modules, and with a module without children, parameters and buffers, such as stochastic depth. Any other may hold
    code for training: a LightningModule with a rate of its own may add a term to the loss.
    """
    is_bare = not (child._modules or child._parameters or child._buffers)
    return type(child).__module__.startswith("torch.") or is_bare


def owns_dropout(child: nn.Module) -> bool:
    """Return whether `child` draws or mixes, or applies a dropout layer's rate by its own mode.

    The attention of transformers' BERT does: its kernel gets the layer's `p` if the attention itself is in train mode.
    The mode of other modules may change more than dropout. So use this only for gradients that are random with
    `draws_or_mixes`.
    """
    own = (one.p > 0 for one in child.children() if isinstance(one, _DropoutNd))
    return draws_or_mixes(child) or (not isinstance(child, (nn.RNNBase, L.LightningModule)) and any(own))
