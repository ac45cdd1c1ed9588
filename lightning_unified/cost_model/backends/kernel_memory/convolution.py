"""Workspaces of cuDNN's convolutions in CUDA's caching allocator.

Tensor cores compute convolutions in channels-last layout only: in half precision and, with TF32 allowed, in float32. cuDNN
copies operands in torch's default layout to that layout and copies the result back. All copies lie in one workspace, with
channels rounded up to 16 bytes. The workspace is taken after the result and given back at once.

On the GPU that will run it, cuDNN itself states the size: `cudnn_plans`. The formulas below are for all other machines.

The gradients of input and weight are two passes, one after the other. The weight's gradient sums over all positions. If it
has fewer tiles than the GPU has multiprocessors, several of these share a tile, each with its own float32 sum.

Each pass first copies an input or a gradient that lies in neither layout, such as a slice of channels. Convolutions with a group
for each channel run in torch's own kernels, without a workspace: `use_cudnn_depthwise` in torch's `native/Convolution.cpp`;
an H200's allocations.

Not copied are: a weight of one point, which is the same in both layouts; operands of a product (one point, no stride);
operands in channels-last; inputs of few channels, in most kernels; inputs of a one-point kernel with a stride, unless it is
wide.

Source: fitted to an H200's allocations under torch 2.11 and cuDNN 9.19 over 1,120 shapes of 2-D convolutions in three dtypes
(1 to 7 points a side, 3 to 512 channels, 16 to 256 entries a side; `cudnn.benchmark` off, TF32 allowed).

| share of passes within 5 % | forward | input's gradient | weight's gradient |
|---|---|---|---|
| workspaces of 64 MiB or more | 95 % | 98 % | 75 % |
| workspaces of 1 MiB or more | 87 % | 96 % | 52 % |

One weight's gradient in four is off by more than 25 %, because cuDNN's choice of an algorithm is not modelled. In
channels-last only copies of the weight and its partial sums are modelled. Other numbers of dimensions, groups and transposed
convolutions follow the same formula: judgement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.device import multiprocessors
from lightning_unified.cost_model.backends.kernel_memory.calls import (
    BACK,
    FLOAT,
    HALF,
    RESULT,
    Call,
    Order,
    byte_count,
    rounded_up,
)
from lightning_unified.cost_model.backends.kernel_memory.cudnn_plans import Operand, Pass, asked_workspace

__all__ = ["cuda_convolution", "cuda_convolution_backward", "is_channels_last"]

_ALIGNMENT_BYTES = 16
_BESIDE, _BESIDE_SUMS = 144, 512  # bytes of a workspace beyond its copies, and beyond its sums
_TILE, _SMALL_TILE, _WIDE_TILE = 128, 64, 256  # channels; the last in half precision only
_SHORT_SUM = 1024  # entries of the weight for a channel of the result
_POSITIONS, _HALF_POSITIONS = 1024, 7168  # fewest positions that one multiprocessor sums
_HALF_SHARES = 6  # fewest multiprocessors that share a tile in half precision
_IDLE = 12  # multiprocessors without a share, in half precision and for inputs of few channels
_LARGE_KERNEL = 7  # least points a side at which an input of few channels is copied
_MOST_ENTRIES = 2**31 - 1  # torch cuts larger batches into parts that kernels can index
_WIDE = 256  # least channels at which a one-point kernel with a stride copies its input in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """One convolution as its passes see it: input, weight and output of the forward pass."""

    source: Tensor
    weight: Tensor
    output: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool

    @property
    def strides(self) -> bool:
        """Whether the kernel leaves positions out."""
        return prod(self.stride) > 1

    @property
    def is_half(self) -> bool:
        return self.source.dtype in HALF

    @property
    def is_product(self) -> bool:
        return self.has_one_point and not self.strides

    @property
    def has_one_point(self) -> bool:
        return prod(self.weight.shape[2:]) == 1

    @property
    def has_few_channels(self) -> bool:
        """Whether the channels of the input or of the output do not fill the alignment."""
        least = _ALIGNMENT_BYTES // self.source.element_size()
        return min(self.weight.shape[:2]) < least

    @property
    def copies(self) -> int:
        """Bytes of all operands in channels-last."""
        kept = 0 if self.has_one_point else _aligned_weight(self.weight)
        return _aligned(self.source) + kept + _aligned(self.output) + _BESIDE


def cuda_convolution(call: Call) -> Order:
    """Return the workspace of a convolution, taken after its result."""
    source, weight, transposed = call.args[0], call.args[1], call.args[6]
    one = _pass(source, weight, call.results[0], call.args[3:6], transposed=transposed)
    copies = _copies(source)
    if _is_depth_wise(source, weight, groups=call.args[8], transposed=transposed):
        return (*copies, RESULT) if copies else ()
    found = _workspace(one, "input") if transposed else _workspace(one, "forward")
    return (*copies, RESULT, found) if copies or found else ()


def cuda_convolution_backward(call: Call) -> Order:
    """Return the workspaces of the gradients, each after its result.

    The bias's gradient is a sum and comes last.
    """
    gradient, source, weight, transposed, mask = *call.args[:3], call.args[7], call.args[10]
    one = _pass(source, weight, gradient, call.args[4:7], transposed=transposed)
    plain = _is_depth_wise(source, weight, groups=call.args[9], transposed=transposed)
    of_gradient, of_both = _copies(gradient), _copies(gradient, source)
    if plain and not of_both:
        return ()
    order: list[int] = []
    if mask[0]:
        found = 0 if plain else _workspace(one, "forward") if transposed else _workspace(one, "input")
        order += [*of_gradient, RESULT, found, BACK, *[BACK] * len(of_gradient)]
    if mask[1]:
        order += [*of_both, RESULT, 0 if plain else _workspace(one, "weight"), BACK, *[BACK] * len(of_both)]
    return (*order, RESULT) if mask[2] else tuple(order)


def _copies(*tensors: Tensor) -> tuple[int, ...]:
    """Return the bytes of a copy of each tensor that lies in no layout that kernels read."""
    return tuple(byte_count(each) for each in tensors if not (each.is_contiguous() or is_channels_last(each)))


def _is_depth_wise(source: Tensor, weight: Tensor, *, groups: int, transposed: bool) -> bool:
    """Return whether torch's own kernels run: one group per channel, in torch's default layout."""
    own = groups > 1 and groups == source.shape[1] and weight.shape[0] % groups == 0
    return own and not transposed and not is_channels_last(source)


def is_channels_last(source: Tensor) -> bool:
    """Return whether a tensor of images lies in channels-last layout and not in torch's default."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(source.dim())
    return layout is not None and source.is_contiguous(memory_format=layout) and not source.is_contiguous()


def _pass(source: Tensor, weight: Tensor, output: Tensor, places: Sequence[Any], *, transposed: bool) -> _Pass:
    """Return the pass.

    `places` are stride, padding and dilation, each with an entry for a dimension or one for all.
    """
    dimensions = weight.dim() - 2
    stride, padding, dilation = (tuple(each) * (dimensions if len(each) == 1 else 1) for each in places)
    return _Pass(
        source=source,
        weight=weight,
        output=output,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
    )


def _workspace(one: _Pass, which: Pass) -> int:
    """Return the bytes that a pass takes: as cuDNN states them, else by the formulas.

    `which` names the pass of the convolution that cuDNN runs: a transposed convolution runs as the gradient of one whose input
    is its result.
    """
    asked = _asked(one, which)
    if asked is not None:
        return asked + (_weight_in_channels_last(one) if _runs_in_channels_last(one) and which != "weight" else 0)
    if not _on_tensor_cores(one.source):
        return 0
    return _FORMULAS[which](one)


def _asked(one: _Pass, which: Pass) -> int | None:
    source, output = (one.output, one.source) if one.transposed else (one.source, one.output)
    if max(source.numel(), output.numel()) > _MOST_ENTRIES:
        return None
    last = _runs_in_channels_last(one)
    shapes = [_shape(each) for each in (source, one.weight, output)]
    operands = [Operand(shape, _strides_of(shape, channels_last=last)) for shape in shapes]
    lacking = 4 - one.weight.dim()  # torch gives images of one line an outer dimension
    return asked_workspace(
        which,
        (operands[0], operands[1], operands[2]),
        one.source.dtype,
        padding=(*[0] * lacking, *one.padding),
        stride=(*[1] * lacking, *one.stride),
        dilation=(*[1] * lacking, *one.dilation),
    )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:2], 1, *tensor.shape[2:]) if tensor.dim() == 3 else tuple(tensor.shape)


def _strides_of(shape: tuple[int, ...], *, channels_last: bool) -> tuple[int, ...]:
    order = (0, *range(2, len(shape)), 1) if channels_last else range(len(shape))
    strides, entries = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension], entries = entries, entries * shape[dimension]
    return tuple(strides)


def _runs_in_channels_last(one: _Pass) -> bool:
    return is_channels_last(one.source) or is_channels_last(one.weight)


def _on_tensor_cores(source: Tensor) -> bool:
    return source.dtype in HALF or (source.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)


def _forward(one: _Pass) -> int:
    if is_channels_last(one.source):
        return _weight_in_channels_last(one)
    if one.has_few_channels:
        return _raw(one) if max(one.weight.shape[2:]) >= _LARGE_KERNEL else 0
    if _is_read_in_place(one):
        return 0
    return one.copies - (_aligned(one.output) if _is_written_in_place(one) else 0)


def _backward_data(one: _Pass) -> int:
    if is_channels_last(one.source):
        return _weight_in_channels_last(one)
    if one.is_half:
        return 0 if one.is_product else one.copies
    in_place = one.has_few_channels or one.is_product or (one.has_one_point and min(one.weight.shape[:2]) < _WIDE)
    return 0 if in_place else one.copies


def _backward_weight(one: _Pass) -> int:
    if one.has_few_channels and not one.is_half and max(one.weight.shape[2:]) < _LARGE_KERNEL:
        return 0
    copies = 0 if one.is_product or is_channels_last(one.source) else one.copies
    sums = _sums(one)
    return copies + sums + (_BESIDE_SUMS if sums else 0)


def _is_read_in_place(one: _Pass) -> bool:
    """Return whether the forward pass reads the operands without copies."""
    return one.is_product or (one.has_one_point and max(one.weight.shape[:2]) < _WIDE)


def _is_written_in_place(one: _Pass) -> bool:
    """Return whether the forward pass writes its result in torch's layout.

    It does in float32, for one tile of channels with short sums.
    """
    one_tile = _SMALL_TILE < one.weight.shape[0] <= _TILE
    return not one.is_half and one_tile and prod(one.weight.shape[1:]) <= _SHORT_SUM


def _weight_in_channels_last(one: _Pass) -> int:
    return 0 if one.has_one_point or is_channels_last(one.weight) else byte_count(one.weight)


def _raw(one: _Pass) -> int:
    """Return the bytes of copies of an input of few channels: not rounded in float32."""
    if one.is_half:
        return one.copies
    return sum(byte_count(each) for each in (one.source, one.weight, one.output)) + _BESIDE


def _sums(one: _Pass) -> int:
    """Return the bytes of partial sums of the weight's gradient.

    There are as many sums as multiprocessors, and positions, remain for each tile. If there are more tiles than
    multiprocessors, and most of these would be idle in the last round, all share the remaining tiles.
    """
    rows, columns, points = *one.weight.shape[:2], prod(one.weight.shape[2:])
    positions = one.output.shape[0] * prod(one.output.shape[2:])
    if one.has_few_channels:
        tiles = -(-_rounded(columns, one.weight) * points // _WIDE_TILE)
        shares = min((multiprocessors() - _IDLE) // tiles, positions // _POSITIONS)
        return shares * _aligned_weight(one.weight) * FLOAT // one.weight.element_size()
    height = _SMALL_TILE if rows <= _SMALL_TILE else _WIDE_TILE if one.is_half and rows >= _WIDE_TILE else _TILE
    tiles = -(-rows // height) * -(-columns // _TILE) * points
    if one.is_half:
        shares = min(round((multiprocessors() - _IDLE) / tiles), positions // _HALF_POSITIONS)
        return shares * one.weight.numel() * FLOAT if shares >= _HALF_SHARES else 0
    if tiles > multiprocessors():
        idle = 2 * (tiles % multiprocessors()) < multiprocessors()
        return multiprocessors() * height * _TILE * FLOAT if idle else 0
    shares = min(multiprocessors() // tiles, positions // _POSITIONS)
    return shares * one.weight.numel() * FLOAT if shares > 1 else 0


def _aligned(tensor: Tensor) -> int:
    return byte_count(tensor) // max(tensor.shape[1], 1) * _rounded(tensor.shape[1], tensor)


def _aligned_weight(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    return byte_count(weight) // max(out * into, 1) * _rounded(out, weight) * _rounded(into, weight)


def _rounded(channels: int, tensor: Tensor) -> int:
    return rounded_up(channels, _ALIGNMENT_BYTES // tensor.element_size())


_FORMULAS: Mapping[Pass, Callable[[_Pass], int]] = {
    "forward": _forward,
    "input": _backward_data,
    "weight": _backward_weight,
}
