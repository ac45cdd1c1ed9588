"""Fill the history that an optimizer collects over many steps, before one step is traced."""

from collections.abc import Sequence

import torch
from torch.optim import LBFGS, Optimizer

__all__ = ["fill_histories"]


def fill_histories(optimizers: Sequence[Optimizer]) -> None:
    """Give LBFGS optimizers, after their first step, as many differences as they keep.

    A run has them after `history_size` iterations. Fake gradients never show the curvature that LBFGS wants before it keeps a difference.

    Source:
        torch/optim/lbfgs.py, `LBFGS.step`: the lists `old_dirs`, `old_stps` and `ro`.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, LBFGS):
            continue
        group = optimizer.param_groups[0]
        state = optimizer.state[group["params"][0]]
        direction = state.get("d")
        if direction is None:
            continue
        for _ in range(group["history_size"] - len(state["old_dirs"])):
            state["old_dirs"].append(torch.empty_like(direction))
            state["old_stps"].append(torch.empty_like(direction))
            state["ro"].append(direction.new_empty(()))
