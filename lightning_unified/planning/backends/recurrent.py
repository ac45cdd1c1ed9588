"""LSTM, GRU and RNN as one kernel, the way cuDNN and MPS run them.

On CUDA all layers are one call that keeps a reserve for the backward pass, in entries a position of a row, a unit of `hidden_size` and a
direction, for L layers: LSTM 6·L - 1, GRU 7·L - 1 and plain RNN 2·L - 1. The first two were solved from the reserves that NVIDIA's cuDNN
printed for a 4-layer network of 320 units (736,000,000 and 864,000,000 bytes for the same batch, pytorch issue 2895; they fit 25,000
positions exactly); the last is judgement by the same rule (gates, states, and outputs between layers). In its workspace the kernel takes
about one copy of the weights: from the same source, to 1 MB of 13 and 18. ROCm's MIOpen is taken to be alike: judgement.

MPS has one kernel for LSTM only, which keeps gates, cells and outputs: 6·L, from torch's `mps/operations/RnnOps.mm`. Elsewhere torch
runs a chain of smaller operations on the fake tensors, as it does on the target. Not run on hardware.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["cuda_recurrences", "mps_recurrences"]

_ENTRIES = {
    "lstm": lambda layers: 6 * layers - 1,
    "gru": lambda layers: 7 * layers - 1,
    "rnn_tanh": lambda layers: 2 * layers - 1,
    "rnn_relu": lambda layers: 2 * layers - 1,
}

Rule = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Of a call: of its output, of a state, and of what it keeps and takes."""

    output: tuple[int, ...]
    hidden: tuple[int, ...]
    cell: tuple[int, ...]
    reserve: int
    workspace: int


def cuda_recurrences() -> dict[str, Rule]:
    """Return how each recurrence runs, by the name of torch's function."""
    return {name: _rule(name, _ENTRIES[name], cast=True) for name in _ENTRIES}


def mps_recurrences() -> dict[str, Rule]:
    """Return how LSTM runs; the others are chains of operations there too."""
    return {"lstm": _rule("lstm", lambda layers: 6 * layers, cast=False)}


def _rule(name: str, entries: Callable[[int], int], *, cast: bool) -> Rule:
    has_cell = name == "lstm"

    def run(_: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
        packed = isinstance(args[1], Tensor) and isinstance(args[3], (list, tuple))
        if packed:
            source, _, state, weights, biases, layers, _, train, both = args
        else:
            source, state, weights, biases, layers, _, train, both, _ = args
        states = tuple(state) if has_cell else (state,)
        weights = list(weights)
        if cast and torch.is_autocast_enabled("cpu"):
            source, states, weights = _lowered(source, states, weights)
        positions = source.shape[0] if packed else source.shape[0] * source.shape[1]
        directions = 2 if both else 1
        hidden = weights[1].shape[1] if not _projects(weights, biases) else weights[-1].shape[1]
        rows, out = states[0].shape[1:]
        item = source.element_size()
        call = _Sizes(
            output=(*source.shape[:-1], out * directions),
            hidden=(layers * directions, rows, out),
            cell=(layers * directions, rows, hidden),
            reserve=entries(layers) * positions * hidden * directions * item if train else 0,
            workspace=sum(weight.numel() * item for weight in weights),
        )
        results = _Recurrence.apply(call, source, *states, *weights)
        return results if has_cell else results[:2]  # pyright: ignore[reportOptionalSubscript, reportReturnType]

    return run


def _projects(weights: Sequence[Tensor], biases: bool) -> bool:
    return len(weights) % (4 if biases else 2) != 0


def _lowered(
    source: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    dtype = torch.get_autocast_dtype("cpu")
    return source.to(dtype), tuple(state.to(dtype) for state in states), [weight.to(dtype) for weight in weights]


class _Recurrence(torch.autograd.Function):
    """Takes and keeps what the kernel takes and keeps; its values are empty."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        call, source, *rest = args
        source.new_empty(call.workspace, dtype=torch.uint8)
        output, hidden, cell = (source.new_empty(shape) for shape in (call.output, call.hidden, call.cell))
        reserve = source.new_empty(call.reserve, dtype=torch.uint8)
        ctx.save_for_backward(source, *rest, output, reserve)
        ctx.workspace = call.workspace
        return output, hidden, cell

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, _ = ctx.saved_tensors
        output.new_empty(ctx.workspace, dtype=torch.uint8)
        needed = ctx.needs_input_grad[1:]
        return (None, *(torch.empty_like(t) if need else None for t, need in zip(inputs, needed, strict=True)))
