"""Run LSTM, GRU and RNN as the single kernels of cuDNN and MPS do.

On CUDA one call runs all layers and saves a reserve for the backward pass. For L layers the reserve holds, for each position
of a row, unit of `hidden_size` and direction:

| layer | entries | source |
|---|---|---|
| LSTM | 6·L - 1 | solved from the 736,000,000 bytes that NVIDIA's cuDNN printed for 4 layers of 320 units (pytorch issue 2895; exact for 25,000 positions) |
| GRU | 7·L - 1 | likewise, 864,000,000 bytes for the same batch |
| plain RNN | 2·L - 1 | judgement by the same rule: gates, states, and outputs between layers |

Dropout between layers adds one bit an entry. An LSTM with projections adds the states before and after the projection of each
layer (an H200 under torch 2.11, one layer). Autocast runs the kernel in float16, with all weights in one block, also where it
lowers other operations to bfloat16: `cudnn/AutocastRNN.cpp` in torch, and an H200's allocations. The kernel's workspace is in `kernel_memory/recurrent_workspace.py`. The kernel reads and writes the rows position by position,
and all weights' gradients are one block. ROCm's MIOpen is taken to behave alike: judgement.

MPS has one kernel for LSTM only, which saves gates, cells and outputs: 6·L, from torch's `mps/operations/RnnOps.mm`. Other
layers run as a chain of smaller operations on the fake tensors, as on the target. Not run on hardware.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_unified.cost_model.backends.kernel_memory.recurrent_workspace import Recurrence, workspace_bytes

__all__ = ["cuda_recurrences", "mps_recurrences"]

_ENTRIES = {
    "lstm": lambda layers: 6 * layers - 1,
    "gru": lambda layers: 7 * layers - 1,
    "rnn_tanh": lambda layers: 2 * layers - 1,
    "rnn_relu": lambda layers: 2 * layers - 1,
}
_BITS = 8

Rule = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Shapes of a call's output and states, and the bytes it saves and allocates."""

    output: tuple[int, ...]
    batch_first: bool
    hidden: tuple[int, ...]
    cell: tuple[int, ...]
    weights: int
    reserve: int
    workspace: int


def cuda_recurrences() -> dict[str, Rule]:
    """Return the rule of each recurrence, by the name of torch's function."""
    return {name: _rule(name, _ENTRIES[name], cast=True) for name in _ENTRIES}


def mps_recurrences() -> dict[str, Rule]:
    """Return the rule of LSTM; packed rows and the other recurrences are chains of operations on MPS too."""
    kernel = _rule("lstm", lambda layers: 6 * layers, cast=False)
    return {"lstm": lambda plain, *args: plain(*args) if _packs(args) else kernel(plain, *args)}


def _rule(name: str, entries: Callable[[int], int], *, cast: bool) -> Rule:
    has_cell = name == "lstm"

    def run(_: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
        packed = _packs(args)
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
        projected = layers * positions * (hidden + out) * directions if out < hidden else 0
        dropped = (layers - 1) * entries_a_layer // _BITS if dropout else 0
        call = _Sizes(
            output=(*source.shape[:-1], out * directions),
            batch_first=batch_first,
            hidden=(layers * directions, rows, out),
            cell=(layers * directions, rows, hidden) if has_cell else (0,),
            weights=len(weights),
            reserve=(entries(layers) * entries_a_layer + projected) * item + dropped if train else 0,
            workspace=workspace_bytes(
                Recurrence(
                    kind=name,
                    layers=layers,
                    directions=directions,
                    rows=rows,
                    positions=positions,
                    width=hidden,
                    inputs=source.shape[-1],
                    item=item,
                    weights=sum(weight.numel() for weight in weights if weight.dim() > 1),
                    packed=packed,
                    drops=bool(dropout and train),
                    projected=out if out < hidden else 0,
                )
            )
            if cast
            else 0,
        )
        results = _Recurrence.apply(call, source, *states, *weights)
        return results if has_cell else results[:2]  # pyright: ignore[reportOptionalSubscript, reportReturnType]

    return run


def _packs(args: Sequence[Any]) -> bool:
    """Whether a recurrence got packed rows: their sizes are its second argument."""
    return isinstance(args[1], Tensor) and isinstance(args[3], (list, tuple))


def _projects(weights: Sequence[Tensor], biases: bool) -> bool:
    return len(weights) % (4 if biases else 2) != 0


def _lowered(
    source: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...], list[Tensor]]:
    """Return the operands in float16, and the weights as parts of one block.

    The dtype of autocast does not matter.
    """
    low = list(_Lowered.apply(*weights))  # pyright: ignore[reportArgumentType]
    states = tuple(state.to(torch.float16) for state in states)
    return source.to(torch.float16), states, low


class _Lowered(torch.autograd.Function):
    """Copies weights into one block of float16."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.dtypes = [each.dtype for each in args]
        block = args[0].new_empty(sum(each.numel() for each in args), dtype=torch.float16)
        parts = block.split([each.numel() for each in args])
        return tuple(part.view(each.shape) for part, each in zip(parts, args, strict=True))

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            None if each is None else each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        )


class _Recurrence(torch.autograd.Function):
    """Allocates and saves the kernel's tensors; their values are empty."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        call, source, *rest = args
        given = _by_positions(source, call)
        output, hidden = (source.new_empty(shape) for shape in (_swapped(call.output, call), call.hidden))
        cell = source.new_empty(call.cell)
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
    given = _by_positions(source, call)
    written = _by_positions(gradient, call)
    of_source = source.new_empty(_swapped(source.shape, call))
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
    """Return the tensor with positions first; a copy unless it is contiguous that way."""
    return (tensor.transpose(0, 1) if call.batch_first else tensor).contiguous()


def _swapped(shape: Sequence[int], call: _Sizes) -> tuple[int, ...]:
    first, second, *rest = shape
    return (second, first, *rest) if call.batch_first else tuple(shape)
