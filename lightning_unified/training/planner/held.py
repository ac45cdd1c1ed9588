"""What a fit holds on the device between two steps, and a rehearsal counts too."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unified.planning.static import static_bytes
from lightning_unified.training.split import tensors_in

__all__ = ["held_bytes"]


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer], batch: Any) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state that are there now, and of the batch.

    Args:
        module: Whose they are.
        optimizers: Its optimizers.
        batch: Whole.
    """
    need = static_bytes(module)
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
        if isinstance(value, torch.Tensor)
    ]
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    counted = sum(one.numel() * one.element_size() for one in [*states, *gradients, *tensors_in(batch)])
    return need["weights"] + need["buffers"] + counted
