"""Workspace of oneDNN's LSTM, whose fake run reports an empty one.

The real operator saves a workspace of gates and states for the backward pass. Its size grows with steps, with rows, and with
their product. It is measured by running the operator on this machine's CPU at four small sizes with the layer's true widths,
once for each width.
"""

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_unified.cost_model.backends.kernel_memory.calls import Call, byte_count

__all__ = ["lstm_temporary", "lstm_workspace"]

_FEW, _MORE = 8, 16
_GATES = 4
_PADDING = 16  # entries that oneDNN adds to a row of gates
_FLOAT = 4
_LSTM = 2  # torch's number of the mode
_WIDE = 256  # least entries of a weight's row at which the backward pass packs it twice
_ARGUMENTS_FORWARD = 16
_GRADIENT = 10  # of the output, among the arguments of the backward operation


def lstm_workspace(call: Call) -> int:
    """Return the bytes of the workspace that the backward pass reads.

    It is 0 without gradients, or if the fake result shows the workspace already.
    """
    if not torch.is_grad_enabled() or call.results[3].numel():
        return 0
    source, weight, recurrent = call.args[:3]
    steps, rows, width = source.shape
    low, by_step, by_row, by_both = _corners(width, recurrent.shape[1], source.dtype, weight.dtype)
    far_steps, far_rows = (steps - _FEW) / (_MORE - _FEW), (rows - _FEW) / (_MORE - _FEW)
    return max(round(low + by_step * far_steps + by_row * far_rows + by_both * far_steps * far_rows), 0)


def lstm_temporary(call: Call) -> int:
    """Return the bytes of packed weights, gates and a contiguous gradient.

    Source: measured at a dozen sizes on an AVX-512 machine, most within 5 %. float32 packs the gates of all steps in both
    passes; bfloat16 does so in the backward pass only, where wide weights are packed a second time.
    """
    source, weight, recurrent = call.args[:3]
    steps, rows, width = source.shape
    hidden, single = recurrent.shape[1], source.dtype is torch.float32
    packed = byte_count(weight) + byte_count(recurrent)
    a_step = rows * (_GATES * hidden + _PADDING) * _FLOAT
    if len(call.args) <= _ARGUMENTS_FORWARD:
        return packed + a_step * (steps if single else 1)
    gradient = call.args[_GRADIENT]
    if width >= _WIDE:
        packed += byte_count(weight)
    if hidden >= _WIDE and single:
        packed += byte_count(recurrent)
    if gradient is not None and not gradient.is_contiguous():
        packed += byte_count(gradient)
    return packed + a_step * steps * source.element_size() // _FLOAT


@cache
def _corners(width: int, hidden: int, dtype: torch.dtype, weights: torch.dtype) -> tuple[int, int, int, int]:
    sizes = [_measured(steps, rows, width, hidden, dtype, weights) for steps in (_FEW, _MORE) for rows in (_FEW, _MORE)]
    low, more_rows, more_steps, both = sizes
    return low, more_steps - low, more_rows - low, both - more_steps - more_rows + low


def _measured(steps: int, rows: int, width: int, hidden: int, dtype: torch.dtype, weights: torch.dtype) -> int:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.enable_grad():
        gates = _GATES * hidden
        parameters = [
            torch.zeros(shape, dtype=weights) for shape in ((gates, width), (gates, hidden), (gates,), (gates,))
        ]
        state = torch.zeros(rows, hidden, dtype=dtype)
        operands = (torch.zeros(steps, rows, width, dtype=dtype), *parameters, state, state)
        settings = {"mode": _LSTM, "hidden_size": hidden, "num_layers": 1, "has_biases": True, "bidirectional": False}
        workspace = torch.ops.aten.mkldnn_rnn_layer(
            *operands, reverse=False, batch_sizes=[], batch_first=False, train=True, **settings
        )[3]
        return byte_count(workspace)
