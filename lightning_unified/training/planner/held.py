"""What a fit holds on the device between two steps, and a rehearsal counts too."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unified.planning.static import static_bytes
from lightning_unified.training.rehearsal.trainer import tensors_held
from lightning_unified.training.split import tensors_in

__all__ = ["callback_bytes", "held_bytes"]


def callback_bytes(trainer: L.Trainer, *, on_host: bool) -> int:
    """Return the bytes of what callbacks hold now, other than averages of weights, which a rehearsal makes itself.

    Args:
        trainer: Whose callbacks they are.
        on_host: Whether what is on the host counts.
    """
    return sum(one.numel() * one.element_size() for one in tensors_held(trainer, on_host=on_host))


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer], batch: Any, *, trainer: L.Trainer) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state that are there now, and of the batch.

    Gradients that lie in what a callback holds are the callback's.

    Args:
        module: Whose they are.
        optimizers: Its optimizers.
        batch: Whole.
        trainer: Whose callbacks are meant.
    """
    need = static_bytes(module)
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
    ]
    of_callbacks = {_memory(one) for one in tensors_held(trainer, on_host=True)} - {None}
    all_gradients = [one.grad for one in module.parameters() if one.grad is not None]
    gradients = [one for one in all_gradients if _memory(one) not in of_callbacks]
    counted = sum(one.numel() * one.element_size() for one in [*states, *gradients, *tensors_in(batch)])
    return need["weights"] + need["buffers"] + counted


def _memory(tensor: torch.Tensor) -> int | None:
    """Return where the memory of a tensor begins; None of one that has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
