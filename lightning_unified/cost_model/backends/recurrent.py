"""LSTM, GRU and RNN as one kernel, the way cuDNN and MPS run them.

On CUDA all layers are one call that keeps a reserve for the backward pass, in entries a position of a row, a unit of `hidden_size` and a
direction, for L layers: LSTM 6·L - 1, GRU 7·L - 1 and plain RNN 2·L - 1. The first two were solved from the reserves that NVIDIA's cuDNN
printed for a 4-layer network of 320 units (736,000,000 and 864,000,000 bytes for the same batch, pytorch issue 2895; they fit 25,000
positions exactly); the last is judgement by the same rule (gates, states, and outputs between layers). Dropout between layers adds one bit an entry. In its workspace
the kernel takes about the weights and twice the gates of one layer: within 6 % of two LSTMs that an H200 was recorded with under
torch 2.11 (109.5 MiB for 6,400 positions, 512 units and 2 layers; 351.5 MiB for 8,192, 1024 and 3). The same recordings show what is
copied: the kernel reads and writes a row of positions after the other, and all weights' gradients are one block. ROCm's MIOpen is taken
to be alike: judgement.

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
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_BITS = 8

Rule = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Of a call: of its output, of a state, and of what it keeps and takes; and whether its batch comes before its positions."""

    output: tuple[int, ...]
    batch_first: bool
    hidden: tuple[int, ...]
    cell: tuple[int, ...]
    weights: int
    reserve: int
    workspace: int


def cuda_recurrences() -> dict[str, Rule]:
    """Return how each recurrence runs, by the name of torch's function."""
    return {name: _rule(name, _ENTRIES[name], gates=_GATES[name], cast=True) for name in _ENTRIES}


def mps_recurrences() -> dict[str, Rule]:
    """Return how LSTM runs; the others are chains of operations there too."""
    return {"lstm": _rule("lstm", lambda layers: 6 * layers, gates=0, cast=False)}


def _rule(name: str, entries: Callable[[int], int], *, gates: int, cast: bool) -> Rule:
    has_cell = name == "lstm"

    def run(_: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
        packed = isinstance(args[1], Tensor) and isinstance(args[3], (list, tuple))
        if packed:
            source, _, state, weights, biases, layers, dropout, train, both = args
            batch_first = False
        else:
            source, state, weights, biases, layers, dropout, train, both, batch_first = args
        states = tuple(state) if has_cell else (state,)
        weights = list(weights)
        if cast and torch.is_autocast_enabled("cpu"):
            source, states, weights = _lowered(source, states, weights)
        positions = source.shape[0] if packed else source.shape[0] * source.shape[1]
        directions = 2 if both else 1
        hidden = weights[1].shape[1] if not _projects(weights, biases) else weights[-1].shape[1]
        rows, out = states[0].shape[1:]
        item = source.element_size()
        entries_a_layer = positions * hidden * directions
        dropped = (layers - 1) * entries_a_layer // _BITS if dropout else 0
        call = _Sizes(
            output=(*source.shape[:-1], out * directions),
            batch_first=batch_first,
            hidden=(layers * directions, rows, out),
            cell=(layers * directions, rows, hidden),
            weights=len(weights),
            reserve=entries(layers) * entries_a_layer * item + dropped if train else 0,
            workspace=sum(weight.numel() * item for weight in weights) + 2 * gates * entries_a_layer * item,
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
        given = _by_positions(source, call)
        output, hidden, cell = (
            source.new_empty(shape) for shape in (_swapped(call.output, call), call.hidden, call.cell)
        )
        workspace = source.new_empty(call.workspace, dtype=torch.uint8)
        reserve = source.new_empty(call.reserve, dtype=torch.uint8)
        del workspace, given
        output = output.transpose(0, 1) if call.batch_first else output
        ctx.save_for_backward(source, *rest, output, reserve)
        ctx.call, ctx.states = call, len(rest) - call.weights
        return output, hidden, cell

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, *rest, _, _ = ctx.saved_tensors
        states, weights = rest[: ctx.states], rest[ctx.states :]
        needs_source, *needed = ctx.needs_input_grad[1:]
        of_source, of_states = _pass_to_inputs(ctx.call, gradients[0], source, states)
        of_weights = _pass_to_weights(ctx.call, source, weights) if any(needed[ctx.states :]) else [None] * len(weights)
        found = [one if need else None for one, need in zip([*of_states, *of_weights], needed, strict=True)]
        return None, of_source if needs_source else None, *found


def _pass_to_inputs(
    call: _Sizes, gradient: Tensor, source: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    written = _by_positions(gradient, call)
    of_source = source.new_empty(_swapped(source.shape, call))
    given = _by_positions(source, call)
    of_states = [torch.empty_like(state) for state in states]
    source.new_empty(call.workspace, dtype=torch.uint8)
    del written, given
    return of_source.transpose(0, 1) if call.batch_first else of_source, of_states


def _pass_to_weights(call: _Sizes, source: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    given = _by_positions(source, call)
    all_of_them = source.new_empty(sum(weight.numel() for weight in weights))
    source.new_empty(call.workspace, dtype=torch.uint8)
    del given
    parts = all_of_them.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def _by_positions(tensor: Tensor, call: _Sizes) -> Tensor:
    """Return the tensor with its positions first, a copy where it does not lie so."""
    return (tensor.transpose(0, 1) if call.batch_first else tensor).contiguous()


def _swapped(shape: Sequence[int], call: _Sizes) -> tuple[int, ...]:
    first, second, *rest = shape
    return (second, first, *rest) if call.batch_first else tuple(shape)
