"""The part of the budget that is left for a step, beside memory that others hold."""

from typing import Any

import lightning as L
import torch

from lightning_unified.cost_model.memory.static import static_bytes, tensor_bytes
from lightning_unified.nn.cuda_graphs import replayed_parts
from lightning_unified.planner.dry_run.trainer import tensors_held
from lightning_unified.planner.first_batch.moved_weights import move_weights
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.recovery.checkpoint_io import saves_in_thread
from lightning_unified.step.recovery.measured_room import NEGLIGIBLE
from lightning_unified.step.sharding.rows import local
from lightning_unified.step.split import tensors_in

__all__ = ["StepBudget", "callback_bytes", "held_bytes"]

_APART = 96 * 2**20
"""Judgement: bytes of gaps between tensors that other recordings or eager calls cannot use.

Recordings lie in a memory pool of their own. Five steps of two modules of 125 million parameters, on an H100 and an H200, reserved up to 0.08 GiB more
with recordings than planned without these bytes.
"""


_PAGES_APART = 22 * 2**20
"""Judgement: the same bytes where segments expand.

They are one page of large blocks and one of small blocks, whose rest another pool cannot use.
"""


class StepBudget:
    """Counts the bytes of the budget that a step may take.

    Six owners hold memory beside the step: the process from before the fit, the driver, the module for memory that it keeps from step to step,
    an asynchronous save, CUDA graphs, and the reduction over ranks. The dry run counts the last one as a workspace of the step.

    Args:
        reduction_bytes: Bytes that the device holds during the whole fit to average gradients over ranks.

    Attributes:
        foreign_bytes: Bytes of the pool that are held beside the step and that no dry run counts.
        kept_bytes: Bytes of the budget for memory that the module keeps from step to step.
        reduction_bytes: As given.
    """

    def __init__(self, trainer: L.Trainer, policy: MemoryPolicy, *, reduction_bytes: int) -> None:
        self._trainer, self._policy = trainer, policy
        self.reduction_bytes = reduction_bytes
        self.foreign_bytes = self.kept_bytes = 0

    @property
    def left(self) -> int:
        """Bytes of the budget that the step may take."""
        watch = self._policy.watch
        room = watch.room()
        whole = watch.bytes if room is None else min(watch.bytes, room)
        return whole - self.beside

    def expand_segments(self) -> bool:
        """Let the device's segments expand; return whether that has changed anything.

        `left` may change then. Weights move into expandable segments.
        """
        expands = self._policy.watch.expand_segments()
        if expands:
            move_weights(self._trainer.lightning_module, self._trainer.strategy.root_device)
        return expands

    @property
    def beside(self) -> int:
        """Bytes of the budget outside the step: process, driver, module, saving and recordings."""
        apart = _PAGES_APART if self._policy.watch.expands else _APART
        recorded = apart if replayed_parts(self._trainer.lightning_module) else 0
        return self.foreign_bytes + self._policy.watch.driver_bytes + self.kept_bytes + self.copy_bytes + recorded

    @property
    def copy_bytes(self) -> int:
        """Bytes of the state that an asynchronous save copies, and holds while the next steps run."""
        if not self._trainer.checkpoint_callbacks or not saves_in_thread(self._trainer.strategy.checkpoint_io):
            return 0
        need = static_bytes(self._trainer.lightning_module, self._trainer.optimizers)
        return need["weights"] + need["buffers"] + need["optimizer state"]

    def note_foreign(self, batch: Any) -> None:
        """Read how many bytes of the pool are held now that no dry run counts."""
        watch = self._policy.watch
        allocated = watch.reading().allocated.bytes or 0
        self.foreign_bytes = max(allocated - watch.fresh_code_bytes - self._held(batch), 0)

    def planning_took_memory(self, batch: Any) -> bool:
        """Count memory that planning left in a CPU's pool; return whether there was any.

        Such memory is code, and holes in the heap.
        """
        watch, before = self._policy.watch, self.foreign_bytes
        if watch.counts_process:
            watch.release()
            self.note_foreign(batch)
        return self.foreign_bytes > before

    def is_ample(self, batch: Any) -> bool:
        """Return whether the budget is thousands of times the bytes that the fit holds."""
        gradients = static_bytes(self._trainer.lightning_module, self._trainer.optimizers)["gradients"]
        return NEGLIGIBLE * (self._held(batch) + gradients) <= self._policy.watch.bytes

    def _held(self, batch: Any) -> int:
        """Return the bytes on the device that a dry run counts too."""
        on_host = self._policy.watch.counts_process
        return held_bytes(self._trainer, batch, on_host=on_host) + self.reduction_bytes


def callback_bytes(trainer: L.Trainer, *, on_host: bool) -> int:
    """Return the bytes of tensors that callbacks hold now, without averages of weights.

    A dry run makes the averages itself.

    Args:
        trainer: The Trainer whose callbacks are counted.
        on_host: Whether tensors on the host count.
    """
    return sum(map(tensor_bytes, tensors_held(trainer, on_host=on_host)))


def held_bytes(trainer: L.Trainer, batch: Any, *, on_host: bool) -> int:
    """Return the bytes that the fit and its batch hold now.

    These are weights, buffers, gradients, optimizer state, the batch, and callbacks' tensors.

    A gradient that lies in a callback's tensor counts once.

    Args:
        trainer: In `fit`.
        batch: The whole batch.
        on_host: Whether callbacks' tensors on the host count.
    """
    need = static_bytes(trainer.lightning_module)
    states = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
    ]
    of_callbacks = {_memory(one) for one in tensors_held(trainer, on_host=on_host)} - {None}
    all_gradients = [one.grad for one in trainer.lightning_module.parameters() if one.grad is not None]
    gradients = [one for one in all_gradients if _memory(one) not in of_callbacks]
    counted = sum(map(tensor_bytes, [*states, *gradients, *tensors_in(batch)]))
    return need["weights"] + need["buffers"] + counted + callback_bytes(trainer, on_host=on_host)


def _memory(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory on this rank; None if it has none."""
    tensor = local(tensor)
    return (tensor.untyped_storage().data_ptr() or None) if tensor.layout == torch.strided else None
