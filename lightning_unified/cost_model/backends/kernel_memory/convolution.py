"""What cuDNN's convolutions take of CUDA's caching allocator beside their results.

Its tensor cores compute in channels-last only, in half precision and, with TF32 allowed, in float32. Operands in torch's default layout are
copied there and the result back, all in one workspace, channels rounded up to 16 bytes; it is taken after the result and given back at once.
The gradients of input and weight are two passes, one after the other. That of the weight sums over all positions: where its result has fewer
tiles than the GPU has multiprocessors, several of these share a tile, each with a sum of its own in float32.

What is not copied: a weight of one point, which lies the same in both layouts; anything in a product (one point, no stride); operands in
channels-last; input of few channels, in most kernels; what a one-point kernel with a stride reads, unless it is wide.

Source: fitted to an H200's allocations under torch 2.11 and cuDNN 9.19, 1,120 shapes of 2-D convolutions in three dtypes (1 to 7 points a
side, 3 to 512 channels, 16 to 256 entries a side; `cudnn.benchmark` off, TF32 allowed). Of the passes that take 64 MiB or more, 95 % are
within 5 % forward, 98 % for the input's gradient, 75 % for the weight's; of those from 1 MiB on 87, 96 and 52 %, and one weight's gradient in
four is off by more than 25 %: cuDNN's choice of an algorithm is not followed. In channels-last only copies of the weight and its partial sums
are seen. Other numbers of dimensions, groups and transposed convolutions follow the same formula: judgement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.device import multiprocessors
from lightning_unified.cost_model.backends.kernel_memory.calls import BACK, RESULT, Call, Order, byte_count

__all__ = ["cuda_convolution", "cuda_convolution_backward", "is_channels_last"]

_HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT_BYTES = 16
_BESIDE, _BESIDE_SUMS = 144, 512  # bytes; what a workspace is larger than the copies, and the sums, in it
_FLOAT = 4
_TILE, _SMALL_TILE, _WIDE_TILE = 128, 64, 256  # channels; the last in half precision only
_SHORT_SUM = 1024  # entries of the weight for a channel of the result
_POSITIONS, _HALF_POSITIONS = 1024, 7168  # the fewest that are summed by one multiprocessor
_HALF_SHARES = 6  # the fewest multiprocessors that share a tile in half precision
_IDLE = 12  # multiprocessors that have no share in half precision, or of input of few channels
_LARGE_KERNEL = 7  # points a side, from which on input of few channels is copied
_WIDE = 256  # channels, from which on what a one-point kernel with a stride reads is copied in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """What the passes of one convolution have in common: what reads, what is read and what is written, as the forward pass has them."""

    source: Tensor
    weight: Tensor
    output: Tensor
    strides: bool
    transposed: bool

    @property
    def is_half(self) -> bool:
        return self.source.dtype in _HALF

    @property
    def is_product(self) -> bool:
        return self.has_one_point and not self.strides

    @property
    def has_one_point(self) -> bool:
        return prod(self.weight.shape[2:]) == 1

    @property
    def has_few_channels(self) -> bool:
        """Whether the channels that are read, or those written, do not fill the alignment."""
        least = _ALIGNMENT_BYTES // self.source.element_size()
        return min(self.weight.shape[:2]) < least

    @property
    def copies(self) -> int:
        """Bytes of all operands in channels-last."""
        kept = 0 if self.has_one_point else _aligned_weight(self.weight)
        return _aligned(self.source) + kept + _aligned(self.output) + _BESIDE


def cuda_convolution(call: Call) -> Order:
    """Return the workspace of a convolution, after its result."""
    source, weight, stride, transposed = call.args[0], call.args[1], call.args[3], call.args[6]
    one = _pass(source, weight, call.results[0], stride, transposed=transposed)
    if not _on_tensor_cores(source):
        return ()
    found = _backward_data(one) if transposed else _forward(one)
    return RESULT, found


def cuda_convolution_backward(call: Call) -> Order:
    """Return the workspaces of the gradients, each after its result; the bias's gradient is a sum, and last."""
    gradient, source, weight, stride = call.args[0], call.args[1], call.args[2], call.args[4]
    transposed, mask = call.args[7], call.args[10]
    one = _pass(source, weight, gradient, stride, transposed=transposed)
    if not _on_tensor_cores(source):
        return ()
    order: list[int] = []
    if mask[0]:
        order += [RESULT, _forward(one) if transposed else _backward_data(one), BACK]
    if mask[1]:
        order += [RESULT, _backward_weight(one), BACK]
    return (*order, RESULT) if mask[2] else tuple(order)


def is_channels_last(source: Tensor) -> bool:
    """Return whether a tensor of images lies in memory with its channels last, and not in torch's default order."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(source.dim())
    return layout is not None and source.is_contiguous(memory_format=layout) and not source.is_contiguous()


def _pass(source: Tensor, weight: Tensor, output: Tensor, stride: Sequence[int], *, transposed: bool) -> _Pass:
    return _Pass(source=source, weight=weight, output=output, strides=prod(stride) > 1, transposed=transposed)


def _on_tensor_cores(source: Tensor) -> bool:
    return source.dtype in _HALF or (source.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)


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
    """Return whether the forward pass takes the operands as they are."""
    return one.is_product or (one.has_one_point and max(one.weight.shape[:2]) < _WIDE)


def _is_written_in_place(one: _Pass) -> bool:
    """Return whether the forward pass writes its result in torch's layout: in float32, one tile of channels of short sums."""
    one_tile = _SMALL_TILE < one.weight.shape[0] <= _TILE
    return not one.is_half and one_tile and prod(one.weight.shape[1:]) <= _SHORT_SUM


def _weight_in_channels_last(one: _Pass) -> int:
    return 0 if one.has_one_point or is_channels_last(one.weight) else byte_count(one.weight)


def _raw(one: _Pass) -> int:
    """Return the bytes of copies of input with few channels: not rounded in float32."""
    if one.is_half:
        return one.copies
    return sum(byte_count(each) for each in (one.source, one.weight, one.output)) + _BESIDE


def _sums(one: _Pass) -> int:
    """Return the bytes of partial sums of the weight's gradient: as many as multiprocessors, and positions, are left for a tile of it.

    Where there are more tiles than multiprocessors, and most of these would be idle in the end, all share what is left.
    """
    rows, columns, points = *one.weight.shape[:2], prod(one.weight.shape[2:])
    positions = one.output.shape[0] * prod(one.output.shape[2:])
    if one.has_few_channels:
        tiles = -(-_rounded(columns, one.weight) * points // _WIDE_TILE)
        shares = min((multiprocessors() - _IDLE) // tiles, positions // _POSITIONS)
        return shares * _aligned_weight(one.weight) * _FLOAT // one.weight.element_size()
    height = _SMALL_TILE if rows <= _SMALL_TILE else _WIDE_TILE if one.is_half and rows >= _WIDE_TILE else _TILE
    tiles = -(-rows // height) * -(-columns // _TILE) * points
    if one.is_half:
        shares = min(round((multiprocessors() - _IDLE) / tiles), positions // _HALF_POSITIONS)
        return shares * one.weight.numel() * _FLOAT if shares >= _HALF_SHARES else 0
    if tiles > multiprocessors():
        idle = 2 * (tiles % multiprocessors()) < multiprocessors()
        return multiprocessors() * height * _TILE * _FLOAT if idle else 0
    shares = min(multiprocessors() // tiles, positions // _POSITIONS)
    return shares * one.weight.numel() * _FLOAT if shares > 1 else 0


def _aligned(tensor: Tensor) -> int:
    return byte_count(tensor) // max(tensor.shape[1], 1) * _rounded(tensor.shape[1], tensor)


def _aligned_weight(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    return byte_count(weight) // max(out * into, 1) * _rounded(out, weight) * _rounded(into, weight)


def _rounded(channels: int, tensor: Tensor) -> int:
    least = _ALIGNMENT_BYTES // tensor.element_size()
    return -(-channels // least) * least
