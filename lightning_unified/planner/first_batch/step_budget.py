"""What a fit holds on the device between two steps, and a dry run counts too."""

from typing import Any

import lightning as L
import torch

from lightning_unified.cost_model.memory.static import static_bytes
from lightning_unified.planner.dry_run.trainer import tensors_held
from lightning_unified.step.split import tensors_in

__all__ = ["callback_bytes", "held_bytes"]


def callback_bytes(trainer: L.Trainer, *, on_host: bool) -> int:
    """Return the bytes of what callbacks hold now, other than averages of weights, which a dry run makes itself.

    Args:
        trainer: Whose callbacks they are.
        on_host: Whether what is on the host counts.
    """
    return sum(one.numel() * one.element_size() for one in tensors_held(trainer, on_host=on_host))


def held_bytes(trainer: L.Trainer, batch: Any, *, on_host: bool) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state that are there now, of the batch, and of what callbacks hold.

    Gradients that lie in what a callback holds count once.

    Args:
        trainer: In `fit`.
        batch: Whole.
        on_host: Whether what callbacks hold on the host counts.
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
    counted = sum(one.numel() * one.element_size() for one in [*states, *gradients, *tensors_in(batch)])
    return need["weights"] + need["buffers"] + counted + callback_bytes(trainer, on_host=on_host)


def _memory(tensor: torch.Tensor) -> int | None:
    """Return where the memory of a tensor begins; None of one that has none."""
    return (tensor.untyped_storage().data_ptr() or None) if tensor.layout == torch.strided else None
