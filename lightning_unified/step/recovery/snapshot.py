"""The state that a batch changes before the optimizer step, recorded and restored."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from lightning_unified.errors import RunError
from lightning_unified.step.recovery.generators import GeneratorWatch
from lightning_unified.step.recovery.oom import insist
from lightning_unified.step.undo import TRAINING_STEP, BatchWatch, StateWatch
from lightning_unified.step.undo.functions import names_attribute
from lightning_unified.step.undo.plans import bytes_of

__all__ = ["CopiedGradients", "HeldGradients", "StateCopies", "StepSnapshot", "forget_unscaled"]


class StateCopies:
    """Hooks that run around copies of a step's state; these do nothing.

    A training loop may override them: `StepSnapshot` calls those of the loop's attribute `state_copies` (`step.loop.fault_checked`).
    """

    def made(self) -> None:
        """Run after the state was copied."""

    def needed(self) -> None:
        """Run before the copies are written back."""

    def restored(self) -> None:
        """Run after the copies were written back."""


class StepSnapshot:
    """The state at the start of a step: `step.undo`, generators, logs, progress, scaler, batch.

    Gradients, weights and optimizer state are restored elsewhere: by `HeldGradients`, `CopiedGradients` and
    `step.recovery.weights.WeightsWatch`. They are as large as the model and must not be copied every step.

    Args:
        trainer: The Trainer in the middle of a step.
        state: The watch over attributes, buffers, metrics and other state that a step may change.
        generators: The watch over the process's random generators.
        results: The loop's collection of logged values; None where nothing can be logged.
        batch: The batch that the step is about to receive; None if it receives copies.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        state: StateWatch,
        generators: GeneratorWatch,
        results: _ResultCollection | None,
        batch: Any,
    ) -> None:
        self._trainer, self._watch, self._collection = trainer, state, results
        self.device = trainer.strategy.root_device
        self._generators = generators
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._copies: StateCopies = getattr(loop, "state_copies", None) or StateCopies()
        self._states, self.state = insist(lambda: (generators.note(), state.note()), device=self.device)
        self._copies.made()
        module = trainer.lightning_module
        # a result is updated out of place (lightning/pytorch/trainer/connectors/logger_connector/result.py), so references are enough
        self._results = {} if results is None else {key: dict(result.__dict__) for key, result in results.items()}
        self._batch_size = None if results is None else results.batch_size
        optimizer = loop.optim_progress.optimizer
        trackers = (
            optimizer.step.total,
            optimizer.step.current,
            optimizer.zero_grad.total,
            optimizer.zero_grad.current,
        )
        self._progress = [(tracker, dict(tracker.__dict__)) for tracker in trackers]
        self._names = (module._current_fx_name, trainer._logger_connector._current_fx)
        self._batch, self._stops = BatchWatch(batch), trainer.should_stop

    def restore(self) -> Any:
        """Restore everything as it was when the snapshot was taken, and return the batch.

        Raises:
            RunError: If a change cannot be undone.
        """
        self._copies.needed()
        insist(partial(self._generators.restore, self._states), device=self.device)
        self._restore_results()
        for tracker, state in self._progress:
            tracker.__dict__.update(state)
        self._trainer.lightning_module._current_fx_name, self._trainer._logger_connector._current_fx = self._names
        if self._trainer.should_stop != self._stops and self._step_stops():  # not of a signal's handler
            self._trainer.should_stop = self._stops
        forget_unscaled(self._trainer)
        insist(self.state.restore, device=self.device)
        batch = self._batch.again()
        self._copies.restored()
        return batch

    def undo(self) -> Any:
        """Restore everything after a failed attempt, and return the batch for the next one.

        The watch forgets its findings, so that no freed object of the module stays alive.
        """
        batch = self.restore()
        self._watch.forget()
        return batch

    def _step_stops(self) -> bool:
        return names_attribute(self._trainer.lightning_module, TRAINING_STEP, "should_stop")

    def _restore_results(self) -> None:
        results = self._collection
        if results is None:
            return
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for key, state in self._results.items():
            results[key].__dict__.clear()
            results[key].__dict__.update(state)
        results.batch_size = self._batch_size


class HeldGradients:
    """The gradients of a window's earlier batches, set aside while this batch makes its own.

    Autograd writes this batch's gradients to new tensors. After the batch's last backward pass, the held gradients are
    added to them. The held gradients are kept until the optimizer has stepped: a step that runs out of memory there has
    already clipped the sum in place. So a window of more than one batch needs the bytes of the gradients once more.
    Without a window, nothing is held or copied.

    Args:
        parameters: The trained parameters, whose gradients a backward pass writes.
        within_window: Whether there are gradients of earlier batches, which no `zero_grad` drops.
    """

    def __init__(self, parameters: Sequence[Tensor], *, within_window: bool) -> None:
        self._parameters = parameters
        self._held: list[tuple[Tensor, Tensor]] | None = None
        self._before: list[tuple[Tensor, Tensor]] | None = None
        self._versions: list[int] = []
        if within_window:  # a training_step may run backward or zero_grad itself, before gradients are set aside
            self._before = self._now()
            self._versions = [gradient._version for _, gradient in self._before]

    def hold(self) -> None:
        """Set the present gradients aside.

        Call it after `zero_grad`, before a batch's first backward pass.
        """
        self._held = self._now()
        for parameter, _ in self._held:
            parameter.grad = None
        if self._before is None:  # an optimizer that runs its closure again finds its first run's gradients here
            self._before = self._held

    def add_back(self, *, hold_first: bool) -> None:
        """Add the held gradients to this batch's, in the order of plain accumulation.

        Args:
            hold_first: Whether no backward pass has set them aside.
        """
        if hold_first:
            self.hold()
        for parameter, earlier in self._held or ():
            parameter.grad = earlier.clone() if parameter.grad is None else earlier + parameter.grad

    def restore(self) -> None:
        """Drop this batch's gradients and restore the held ones.

        Raises:
            RunError: If the step itself added to the gradients of earlier batches.
        """
        if self._before is None:
            return
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, earlier in self._before:
            parameter.grad = earlier
        if any(one._version != version for (_, one), version in zip(self._before, self._versions, strict=False)):
            raise RunError(
                "memory ran out in a training_step that had run a backward pass of its own, and so changed the gradients of earlier batches "
                "of an accumulation window; the step cannot be repeated exactly. Resume from the last checkpoint, and use "
                "torch.autograd.grad(...) in the step, or backward(inputs=...), which leave parameters' gradients alone."
            )

    def _now(self) -> list[tuple[Tensor, Tensor]]:
        return [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]


class CopiedGradients:
    """Copies of the gradients of tensors that no optimizer of the Trainer has.

    No `zero_grad` of the Trainer drops these gradients: they grow until the user's own code drops them, at any time in a step.

    Args:
        leaves: The tensors.
        apart_from: The parameters of the optimizer, which `HeldGradients` has.
        device: The device of the step.
    """

    def __init__(self, leaves: Sequence[Tensor], *, apart_from: Sequence[Tensor], device: torch.device) -> None:
        known = {*map(id, apart_from)} if leaves else ()
        others = [leaf for leaf in leaves if id(leaf) not in known]
        self._copies = insist(
            lambda: [(leaf, None if leaf.grad is None else leaf.grad.clone()) for leaf in others], device=device
        )

    @property
    def bytes(self) -> int:
        """The bytes of the copies."""
        return sum(bytes_of(gradient) for _, gradient in self._copies if gradient is not None)

    def restore(self) -> None:
        """Put the copies in place of the present gradients."""
        for leaf, gradient in self._copies:
            leaf.grad = gradient


def forget_unscaled(trainer: L.Trainer) -> None:
    """Let the gradient scaler begin the step again.

    The scaler refuses a second `unscale_` before `update`. A fused optimizer gets the scale as an attribute, which the
    scaler removes after the step. The scaler multiplies the next scale with an attribute that it finds there. An
    attribute left by a failed step would thus divide the next gradients twice (torch 2.13, grad_scaler.py).
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        plugin.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for optimizer in trainer.strategy.optimizers:
            for name in ("grad_scale", "found_inf"):
                optimizer.__dict__.pop(name, None)
