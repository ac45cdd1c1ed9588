"""Run single LSTM and GRU cells as the fused kernels of CUDA and ROCm do.

Two products without biases give the gates of input and state. One kernel adds the biases, applies the gates, and saves them
for the backward pass: 4 entries a unit of an LSTM, 5 of a GRU. Autograd also saves the two products and the old state, which
only a second derivative reads. The backward pass writes the gradients of the gates; the sum of these over the rows is the
gradient of the biases. Other backends run a chain of smaller operations, on fake tensors too. Cells of plain RNNs are such a
chain everywhere.

Source: `LSTMCell` and `GRUCell` in torch's `native/RNN.cpp`, their kernels in `native/cuda/RNN.cu`, and the formulas of
`_thnn_fused_lstm_cell` and `_thnn_fused_gru_cell` in `derivatives.yaml`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

__all__ = ["fused_gru_cell", "fused_lstm_cell"]

_LSTM_SAVES, _GRU_SAVES = 4, 5  # entries a unit


def fused_lstm_cell(
    _: Callable[..., Any],
    input: Tensor,  # noqa: A002 - torch's name
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run an LSTM cell as CUDA does."""
    state, cell = hx
    gates = functional.linear(input, w_ih), functional.linear(state, w_hh)
    return _LstmCell.apply(*gates, cell, b_ih, b_hh)  # pyright: ignore[reportReturnType]


def fused_gru_cell(
    _: Callable[..., Any],
    input: Tensor,  # noqa: A002 - torch's name
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Run a GRU cell as CUDA does."""
    gates = functional.linear(input, w_ih), functional.linear(hx, w_hh)
    return _GruCell.apply(*gates, hx, b_ih, b_hh)  # pyright: ignore[reportReturnType]


def _bias_gradients(gates: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if bias is None else gate.sum(0) for gate, bias in zip(gates, biases, strict=True)]


class _LstmCell(torch.autograd.Function):
    """Allocates and saves the kernel's tensors; their values are empty."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        inputs, hidden, cell, *biases = args
        state, new_cell = torch.empty_like(cell), torch.empty_like(cell)
        saved = cell.new_empty(cell.shape[0], _LSTM_SAVES * cell.shape[1])
        ctx.save_for_backward(inputs, hidden, cell, new_cell, saved, *biases)
        return state, new_cell

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, cell, _, saved, *biases = ctx.saved_tensors
        gates, of_cell = torch.empty_like(saved), torch.empty_like(cell)
        of_bias = None if biases[0] is None else gates.sum(0)
        return gates, gates, of_cell, of_bias, None if biases[1] is None else of_bias


class _GruCell(torch.autograd.Function):
    """Allocates and saves the kernel's tensors; their values are empty."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs, hidden, state, *biases = args
        new_state, saved = torch.empty_like(state), state.new_empty(state.shape[0], _GRU_SAVES * state.shape[1])
        ctx.save_for_backward(inputs, hidden, state, saved, *biases)
        ctx.width = state.shape[1]
        return new_state

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, _, _, saved, *biases = ctx.saved_tensors
        gates = [saved.new_empty(saved.shape[0], 3 * ctx.width) for _ in range(2)]
        of_state = saved.new_empty(saved.shape[0], ctx.width)
        return *gates, of_state, *_bias_gradients(gates, biases)
