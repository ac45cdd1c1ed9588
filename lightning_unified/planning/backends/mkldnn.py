"""oneDNN's LSTM, whose fake run says that it keeps nothing for the backward pass.

The real one keeps a workspace of gates and states that grows with steps and rows, and with their product. It is asked of the operator
itself: run on this machine's CPU at four small sizes with the layer's true widths, once for each width.
"""

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_unified.planning.backends.calls import Call, byte_count

__all__ = ["lstm_temporary", "lstm_workspace"]

_FEW, _MORE = 8, 16
_GATES = 4
_PADDING = 16  # entries that oneDNN adds to a row of gates
_FLOAT = 4
_LSTM = 2  # torch's number of the mode
_SECOND_COPY_FROM = 256  # hidden entries from which the backward pass packs the weights twice


def lstm_workspace(call: Call) -> int:
    """Return the bytes of the workspace that the backward pass reads: 0 without one, and where the fake result shows it already."""
    if not torch.is_grad_enabled() or call.results[3].numel():
        return 0
    source, weight, recurrent = call.args[:3]
    steps, rows, width = source.shape
    low, by_step, by_row, by_both = _corners(width, recurrent.shape[1], source.dtype, weight.dtype)
    far_steps, far_rows = (steps - _FEW) / (_MORE - _FEW), (rows - _FEW) / (_MORE - _FEW)
    return max(round(low + by_step * far_steps + by_row * far_rows + by_both * far_steps * far_rows), 0)


def lstm_temporary(call: Call) -> int:
    """Return packed weights and the gates of all steps, in float32 (measured at six sizes; within 5 % of them)."""
    source, weight, recurrent = call.args[:3]
    hidden = recurrent.shape[1]
    steps, rows = source.shape[:2]
    weights = sum(byte_count(each) for each in (weight, recurrent))
    backward = len(call.args) > 20 and hidden >= _SECOND_COPY_FROM
    return steps * rows * (_GATES * hidden + _PADDING) * _FLOAT + weights * (2 if backward else 1)


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
