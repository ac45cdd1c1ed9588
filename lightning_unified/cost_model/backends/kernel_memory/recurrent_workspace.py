"""Workspaces of cuDNN's LSTM, GRU and RNN.

A workspace holds the weights, 8 MiB for each layer and direction, and a number of planes. A plane is one entry for each row, step
and unit of a direction. With I entries of the input for each of the H units, the planes are:

| layer | one direction | both directions | packed rows, one direction | packed, both |
|---|---|---|---|---|
| LSTM | 5 + I/H | 14 + I/H | 4 | 12 |
| GRU and RNN, one layer | 4 + 2·I/H | 12 + I/H (RNN 10 + 2·I/H) | 3 | 10 |
| GRU and RNN, more layers | 4 + I/H | 12 + 2·I/H | 3 | 10 |

Each layer adds a few steps of planes, and a projection its share of the units. Dropout between layers of one direction adds a plane. Widths below 128 add the planes of
`_NARROW`. One layer of LSTM in half precision, one direction, up to 128 rows and at least 256 units, takes 24 planes.

Source: 272 calls on a Hopper GPU under torch 2.11 (`python -m benchmarks.planner.kernels`). 75 % of the calls are within 1 %,
90 % within 4 %. Plain RNNs of few rows and narrow layers take up to twice as much: other kernels, not modelled.
"""

from dataclasses import dataclass

from lightning_unified.units import MIB

__all__ = ["Recurrence", "workspace_bytes"]

_BESIDE = 8 * MIB  # of a layer and a direction
_PERSISTENT_PLANES, _PERSISTENT_ROWS, _PERSISTENT_WIDTH = 24, 128, 256
_NARROW_WIDTH = 128
_NARROW = {"lstm": 16, "gru": 14, "rnn_tanh": 10, "rnn_relu": 10}
_HALF_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Sizes of one call.

    Attributes:
        kind: torch's name: `"lstm"`, `"gru"`, `"rnn_tanh"`, `"rnn_relu"`.
        positions: Steps of all rows together.
        width, inputs: Units of a direction, and entries of the input.
        item: Bytes of an entry.
        weights: Entries of all weights without biases.
        packed: Whether rows of unequal length are packed.
        drops: Whether there is dropout between layers.
        projected: Entries of a projected state; 0 without projections.
    """

    kind: str
    layers: int
    directions: int
    rows: int
    positions: int
    width: int
    inputs: int
    item: int
    weights: int
    packed: bool
    drops: bool
    projected: int = 0


def workspace_bytes(call: Recurrence) -> int:
    """Return the bytes of the workspace of one call, the same in both passes."""
    steps = call.positions / max(call.rows, 1)
    if _persists(call):
        return _PERSISTENT_PLANES * call.positions * call.width * call.item
    planes = _packed_planes(call) if call.packed else _planes(call)
    entries = (planes * steps + _steps_a_layer(call) * call.layers) * call.rows * call.width + call.weights
    return round(entries) * call.item + _BESIDE * call.layers * call.directions


def _persists(call: Recurrence) -> bool:
    """Return whether the kernel keeps its weights on the chip during all steps."""
    one = call.kind == "lstm" and call.layers == call.directions == 1 and call.item == _HALF_BYTES
    is_plain = not call.packed and not call.projected
    return one and is_plain and call.rows <= _PERSISTENT_ROWS and call.width >= _PERSISTENT_WIDTH


def _planes(call: Recurrence) -> float:
    share, both = call.inputs / call.width, call.directions > 1
    extra = _NARROW[call.kind] if call.width < _NARROW_WIDTH else 0
    extra += call.drops and not both
    extra += call.directions * call.projected / call.width
    if call.kind == "lstm":
        return (14 if both else 5) + share + extra
    if call.layers > 1:
        return (12 + 2 * share if both else 4 + share) + extra
    if not both:
        return 4 + 2 * share + extra
    return (12 + share if call.kind == "gru" else 10 + 2 * share) + extra


def _packed_planes(call: Recurrence) -> int:
    return {("lstm", 1): 4, ("lstm", 2): 12}.get((call.kind, call.directions), 3 if call.directions == 1 else 10)


def _steps_a_layer(call: Recurrence) -> int:
    if call.packed:
        return {("lstm", 1): 6, ("lstm", 2): 16}.get((call.kind, call.directions), 3 if call.directions == 1 else 10)
    return {("lstm", 1): 10, ("lstm", 2): 24}.get((call.kind, call.directions), 5 if call.directions == 1 else 14)
