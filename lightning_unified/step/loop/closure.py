"""The closure of an optimizer step over several micro-batches, and the order of its calls.

Lightning's closure runs `training_step`, `zero_grad` and `backward`, in that order. Over micro-batches, `training_step` and `backward`
run once for each of them and `zero_grad` once for the batch. A closure of our own is needed, because Lightning's freezes the result of
`training_step` before `backward`: with it, callbacks would see the first micro-batch's outputs only.
"""

import dis
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.nn.second_run.libraries import is_ours
from lightning_unified.step.loop.split_batch import SplitBatch, WholeBatch
from lightning_unified.step.recovery.undone_run import parameters_of_step

__all__ = [
    "ClosureHooks",
    "LateZeroGrad",
    "MicroBatchClosure",
    "ZeroGrad",
    "order_of_zeroing",
    "overrides",
    "reads_batch",
]

_END = "on_train_batch_end"
_SEE_BATCH = ("on_train_batch_start", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ClosureHooks(Protocol):
    """The loop as the closure calls it, between and after micro-batches."""

    _skip_backward: bool

    def zeroing(self, zero_grad: Callable[[], None] | None, *, micro_batches: int) -> "ZeroGrad | None":
        """Return the object that zeroes gradients; None if the batch opens no accumulation window."""
        ...

    def leaves(self) -> Sequence[Tensor]:
        """Return the tensors that get gradients, besides the optimizers' parameters."""
        ...

    def has_terms(self) -> bool:
        """Return whether the batch has a loss term, and so a gradient."""
        ...

    def backward_micro_batch(
        self, loss: Tensor, optimizer: Optimizer, *, share: float | None, first: bool, kept: Sequence[Tensor]
    ) -> Tensor:
        """Run one micro-batch's backward pass, with its loss multiplied by `share`."""
        ...

    def after_backward(self, loss: Tensor | None, optimizer: Optimizer) -> None:
        """Run the hooks that follow a batch's last backward pass."""

    def before_weights(self, optimizer: Optimizer) -> None:
        """Record weights and optimizer state before the optimizer writes them."""


class MicroBatchClosure(Closure):
    """Lightning's closure for several micro-batches: step and backward for each, one zero_grad."""

    def __init__(
        self,
        loop: ClosureHooks,
        batch: WholeBatch | SplitBatch,
        optimizer: Optimizer,
        zero_grad: Callable[[], None] | None,
    ) -> None:
        super().__init__(step_fn=partial(batch.step, 0), backward_fn=None, zero_grad_fn=zero_grad)
        self._loop, self._batch, self._optimizer = loop, batch, optimizer

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        loop, batch = self._loop, self._batch
        outputs: list[ClosureResult] = []
        scaled: Tensor | None = None
        zeroing, last = loop.zeroing(self._zero_grad_fn, micro_batches=batch.count), batch.count - 1
        batch.begin(loop.leaves())
        for index in range(batch.count):
            output = batch.step(index, in_window=self._zero_grad_fn is None)
            batch.end_micro_batch()
            if zeroing is not None:
                zeroing.after_step(first=index == 0, last=index == last, settle=batch.settle)
            batch.begin_backward()
            if output.closure_loss is not None and not loop._skip_backward and loop.has_terms():
                with batch.recording():
                    scaled = loop.backward_micro_batch(
                        output.closure_loss,
                        self._optimizer,
                        share=batch.share(index),
                        first=scaled is None,
                        kept=batch.keeping(),
                    ).detach()
            batch.end_backward()
            output.closure_loss = None  # the graph ends here, before the next micro-batch builds its own
            outputs.append(output)
        batch.settle()  # hooks after backward may read logs and written state
        loop.after_backward(scaled, self._optimizer)
        result = batch.join(outputs)
        if result.loss is None:
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        loop.before_weights(self._optimizer)
        return result


class ZeroGrad:
    """Zeroes gradients after the step of the first micro-batch, before its backward pass.

    Args:
        zero_grad: Lightning's function: calls `on_before_zero_grad`, then `optimizer_zero_grad`.
        kept: The parameters whose gradients are copied before that, for `undo`; none if no user's hook sees them.
    """

    def __init__(self, zero_grad: Callable[[], None], kept: Iterable[Tensor] = ()) -> None:
        self._zero_grad, self._kept = zero_grad, list(kept)
        self._before: list[Tensor | None] | None = None

    def after_step(self, *, first: bool, last: bool, settle: Callable[[], None]) -> None:  # noqa: ARG002  # see LateZeroGrad
        """Follow a micro-batch's step.

        Args:
            first: Whether it is the batch's first.
            last: Whether it is the batch's last.
            settle: Writes the state that the whole batch's step would have written.
        """
        if first:
            self._zero()

    def _zero(self) -> None:
        self._before = [None if one.grad is None else one.grad.clone() for one in self._kept]
        self._zero_grad()

    def undo(self) -> None:
        """Restore the gradients of the step before, for the hooks of a repeated step."""
        if self._before is not None:
            _put(self._kept, self._before)
        self._before = None


class LateZeroGrad(ZeroGrad):
    """Zeroes gradients after the last micro-batch's step, for users with `on_before_zero_grad`.

    Otherwise a momentum teacher that the hook updates would differ between the first micro-batch and the others. As
    with a whole batch, the hook finds the gradients of the step before. Until then these gradients are set aside, which
    costs their bytes.
    """

    def __init__(
        self, zero_grad: Callable[[], None], parameters: Iterable[Tensor], kept: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(zero_grad, kept)
        self._parameters = list({id(one): one for one in parameters}.values())
        self._aside: list[Tensor | None] | None = None

    def after_step(self, *, first: bool, last: bool, settle: Callable[[], None]) -> None:
        if first:
            self._aside = [parameter.grad for parameter in self._parameters]
            _put(self._parameters, [None] * len(self._parameters))
        if last:
            settle()
            made = [parameter.grad for parameter in self._parameters]
            self._put_back()
            self._zero()
            sums = [_sum(parameter.grad, one) for parameter, one in zip(self._parameters, made, strict=True)]
            _put(self._parameters, sums)

    def undo(self) -> None:
        """Restore the gradients that are set aside, or those before they were zeroed."""
        self._put_back()
        super().undo()

    def _put_back(self) -> None:
        if self._aside is not None:
            _put(self._parameters, self._aside)
        self._aside = None


def order_of_zeroing(
    zero_grad: Callable[[], None] | None,
    trainer: L.Trainer,
    *,
    leaves: Iterable[Tensor],
    micro_batches: int,
    keeps: bool,
) -> ZeroGrad | None:
    """Return the object that zeroes gradients at the right micro-batch.

    Args:
        zero_grad: Lightning's function; None if the batch does not open an accumulation window.
        trainer: Its module and callbacks may have the hook `on_before_zero_grad`.
        leaves: Tensors besides the parameters of module and optimizers that get gradients.
        micro_batches: The number of micro-batches of the batch.
        keeps: Whether to copy gradients that users' hooks see, because the step is repeated if memory runs out.
    """
    if zero_grad is None:
        return None
    module = trainer.lightning_module
    sees = overrides(trainer, "on_before_zero_grad")
    sees_zeroing = sees or _has_own(module, "optimizer_zero_grad", L.LightningModule)
    parameters = parameters_of_step(trainer) if sees_zeroing else ()
    kept = parameters if keeps else ()
    return (
        LateZeroGrad(zero_grad, (*parameters, *leaves), kept)
        if micro_batches > 1 and sees
        else ZeroGrad(zero_grad, kept)
    )


def overrides(trainer: L.Trainer, hook: str) -> bool:
    """Return whether the module or one of the user's callbacks has its own `hook`."""
    if _has_own(trainer.lightning_module, hook, L.LightningModule):
        return True
    callbacks = getattr(trainer, "callbacks", []) if hasattr(L.Callback, hook) else []
    return any(_has_own(callback, hook, L.Callback) for callback in callbacks)


def reads_batch(trainer: L.Trainer) -> bool:
    """Return whether a user's hook may read the batch after the step.

    That is `on_train_batch_end`, unless its code leaves the argument alone and no earlier hook may have kept the batch.
    """
    module, callbacks = trainer.lightning_module, getattr(trainer, "callbacks", [])
    ends = [vars(module).get(_END, module.on_train_batch_end)] if _has_own(module, _END, L.LightningModule) else []
    reads = any(_reads_argument(one, 1) for one in ends)
    own = [getattr(one, _END) for one in callbacks if _has_own(one, _END, L.Callback)]
    reads |= any(_reads_argument(one, 3) for one in own)
    return reads or (bool(ends or own) and any(overrides(trainer, hook) for hook in _SEE_BATCH))


def _reads_argument(hook: Any, index: int) -> bool:
    """Return whether a hook may read its argument at a place; the object that has the method does not count."""
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    place = index + int(function is not hook)
    if place < code.co_argcount:
        name = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return True
    loads = (one.argval for one in dis.get_instructions(code) if "LOAD" in one.opname)
    named = (name == value or (isinstance(value, tuple) and name in value) for value in loads)
    return name in code.co_cellvars or "locals" in code.co_names or any(named)


def _has_own(user: Any, hook: str, base: type) -> bool:
    is_in_class = getattr(type(user), hook) is not getattr(base, hook) and not is_ours(type(user))
    return is_in_class or hook in vars(user)  # as LambdaCallback has


def _put(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _sum(left: Tensor | None, made: Tensor | None) -> Tensor | None:
    """Return the gradient after a backward pass that adds `made` to `left`; either may be None."""
    if left is None or made is None:
        return made if left is None else left
    return left + made
