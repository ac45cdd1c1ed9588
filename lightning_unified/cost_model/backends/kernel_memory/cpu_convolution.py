"""Copies of a convolution on a CPU, by oneDNN and by torch's own kernels.

oneDNN computes in blocks of 16 channels. It copies operands to that layout and results back. A call's memory is the largest
sum that lives at once in its passes: result, gradient of the input, gradient of the weight. With strides, the gradient of the
input is computed in channels-last and copied twice. In bfloat16, weights' gradients are summed in float32, beside a
transposed image of each operand, and a one-point kernel sums an image of its result in float32. Operands in channels-last
layout are not copied, but weights are, padded to blocks in each group: the gradient of depth-wise weights of more than 3 entries a side takes 256
times the weight. Without blocks are computed groups whose channels are no multiple of 4 (in the backward pass, of 8), and the gradients of such
depth-wise weights in the usual layout.

In some cases torch does not use oneDNN: float64, one row of a small image, a one-point kernel on one thread. Then torch
unfolds the input into columns, group by group, and concatenates the groups' results.

Source: measured call by call on one AVX-512 machine without matrix tiles, with one thread, and with two where threads count (torch 2.13;
float32, bfloat16 and float64; 1 to 3 dimensions, strided, grouped, transposed). The formula is exact in float32 and within about 40 KiB in
bfloat16; with up to 8 channels on the side against the strides within 5 %. It overestimates kernels as wide as their stride, whose weights'
gradients are matrix products without copies. It underestimates kernels of some dozen entries, for which oneDNN unfolds the input, and groups of
9 or more channels that are no multiple of 8. Sums of further threads, up to one weight each in float32, are not modelled. The use of oneDNN
follows `use_mkldnn` in torch's native/Convolution.cpp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import FLOAT, HALF, Call, byte_count, rounded_up
from lightning_unified.cost_model.backends.kernel_memory.convolution import is_channels_last

__all__ = ["cpu_convolution", "cpu_convolution_backward"]

_BLOCK, _HALF_BLOCK, _QUARTER_BLOCK = 16, 8, 4
_DIRECT, _VOLUME = 3, 3  # most entries a side, and fewer dimensions, of depth-wise kernels with a gradient of their own
_FEWEST = 4  # least channels of an input at which the gradient of a float32 weight reads it in blocks
_OWN_ROWS, _OWN_ENTRIES, _OWN_KERNEL = 16, 20480, 3  # torch uses its own kernels below these


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One call: input, weight and parameters.

    The input is the convolved tensor, also for a transposed convolution.
    """

    source: Tensor
    weight: Tensor
    output: Tensor
    strided: bool
    dilated: bool
    transposed: bool
    groups: int

    @property
    def point(self) -> bool:
        return prod(self.weight.shape[2:]) == 1

    @property
    def half(self) -> bool:
        return self.weight.dtype in HALF

    @property
    def by_onednn(self) -> bool:
        if not torch.backends.mkldnn.is_available() or self.weight.dtype not in (torch.float32, *HALF):
            return False
        rows, kernel = self.source.shape[0], self.weight.shape[2:]
        wide = len(kernel) > 1 and min(kernel[-2:]) > _OWN_KERNEL
        large = rows > 1 or self.source.numel() > _OWN_ENTRIES or wide or self.groups > 1
        worth = self.strided or self.dilated or not self.point or rows >= _OWN_ROWS or torch.get_num_threads() > 1
        return self.half or (large and worth)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.weight.shape[1] == 1 and self.weight.shape[0] == self.groups

    @property
    def of_volumes(self) -> bool:
        """Whether it is depth-wise in 3 dimensions and float32; its result is then there beside both copies."""
        return self.depthwise and len(self.weight.shape[2:]) == _VOLUME and not self.half

    @property
    def direct(self) -> bool:
        """Whether oneDNN has a kernel of its own for a depth-wise weight's gradient."""
        kernel = self.weight.shape[2:]
        return self.depthwise and not self.dilated and len(kernel) < _VOLUME and max(kernel) <= _DIRECT

    def fills(self, block: int) -> bool:
        """Return whether the channels of a group fill blocks.

        Otherwise float32 is computed in the layout of the operands.
        """
        each = self.weight.shape[0] // self.groups, self.weight.shape[1]
        is_grouped = self.groups > 1 and not self.depthwise and not self.transposed and not self.half
        return not is_grouped or not any(channels % block for channels in each)

    @property
    def few(self) -> bool:
        """Whether the input has less than a block of channels; the result then needs no copy."""
        return self.source.shape[1] < _BLOCK and self.groups == 1 and not self.point

    @property
    def narrow(self) -> int:
        """Channels of the side against the strides: the input, or the result of a transposed convolution."""
        return self.weight.shape[1] * self.groups

    @property
    def images(self) -> int:
        """Bytes of the images that threads transpose in a pass against the strides, each beside a weight.

        oneDNN does so where that side has few channels.
        """
        if self.groups > 1 or not self.strided or self.narrow > _HALF_BLOCK:
            return 0
        wide = self.source if self.transposed else self.output
        threads = min(torch.get_num_threads(), wide.shape[0])
        return threads * (_blocked(wide) // wide.shape[0] + _blocked_weight(self.weight))

    @property
    def channels_last_inside(self) -> bool:
        """Whether the pass against the strides is computed in channels-last layout."""
        wide = self.groups == 1 or min(self.weight.shape[0] // self.groups, self.weight.shape[1]) >= _BLOCK
        return self.strided and (wide or (self.half and self.weight.shape[1] == 1))

    @property
    def columns(self) -> int:
        """Bytes of a group's input unfolded, a column for each position of the result.

        A dilated convolution unfolds one image at a time.
        """
        smaller = self.source if self.transposed else self.output
        if self.point and not self.strided and not self.transposed:
            return 0
        positions = prod(smaller.shape[2:]) * (1 if self.dilated else self.source.shape[0])
        return positions * prod(self.weight.shape[1:]) * self.weight.element_size()

    @property
    def image(self) -> int:
        """Bytes of an input image at the result's positions, for a one-point kernel with strides."""
        if not self.point or not self.strided:
            return 0
        return self.source.shape[1] * prod(self.output.shape[2:]) * self.source.element_size()


def cpu_convolution(call: Call) -> tuple[int, ...]:
    """Return a convolution's blocks beside its output: copies of operands, or the output twice."""
    source, weight, stride, dilation, transposed, groups = (call.args[index] for index in (0, 1, 3, 5, 6, 8))
    output = call.results[0]
    one = _described(source, weight, output, stride, dilation, transposed=transposed, groups=groups)
    if not one.by_onednn:
        return _by_groups(one, one.columns, shown=byte_count(output)), _made_contiguous(source)
    if is_channels_last(source):
        return (_weight_of_channels_last(one, most=1),)
    if not one.fills(_QUARTER_BLOCK):
        return byte_count(output), _made_contiguous(source)
    sums = output.numel() // output.shape[0] * FLOAT if one.point and one.half else 0
    copied = 0 if one.few else _blocked(source)
    turned = transposed and one.strided
    images = one.images if turned else 0
    result = byte_count(output) if one.of_volumes else 0
    copies = result, _output_copy(one), copied, _blocked_weight(weight, few=one.few), one.image, sums, images
    again = 2 * [byte_count(output)] if turned else [_blocked(output)]
    return (*_beside(byte_count(output), copies, [byte_count(output), *again]), _made_contiguous(source))


def cpu_convolution_backward(call: Call) -> tuple[int, ...]:
    """Return the backward pass's blocks beside the gradients: those of the larger of two passes."""
    gradient, source, weight, stride, dilation, transposed, groups, mask = (
        call.args[index] for index in (0, 1, 2, 4, 6, 7, 9, 10)
    )
    one = _described(source, weight, gradient, stride, dilation, transposed=transposed, groups=groups)
    shown = sum(byte_count(result) for result in call.results)
    contiguous = _made_contiguous(gradient), _made_contiguous(source)
    if not one.by_onednn:
        return _by_groups(one, one.columns // (source.shape[0] if transposed else 1), shown=shown), *contiguous
    if is_channels_last(source):
        return _weight_gradient_of_channels_last(one), _images(one)
    of_input = byte_count(source) if mask[0] else 0
    passes = _input_passes(one, gradient) if mask[0] else []
    if mask[1]:
        unblocked = not one.fills(_HALF_BLOCK) or (one.depthwise and not one.direct and not one.half)
        copies = () if unblocked else _weight_pass(one, gradient)
        passes += [(of_input, *copies), (of_input, 2 * _blocked_weight(weight))]
    return *_beside(shown, *passes), *contiguous


def _beside(shown: int, *passes: Sequence[int]) -> Iterator[int]:
    """Yield the blocks of the largest pass beyond the results, which are its first blocks."""
    for piece in max(passes, key=sum, default=()):
        yield max(piece - shown, 0)
        shown = max(shown - piece, 0)


def _described(
    source: Tensor, weight: Tensor, output: Tensor, stride: Any, dilation: Any, *, transposed: bool, groups: int
) -> _Convolution:
    return _Convolution(
        source=source,
        weight=weight,
        output=output,
        strided=max(stride) > 1,
        dilated=max(dilation) > 1,
        transposed=transposed,
        groups=groups,
    )


def _by_groups(one: _Convolution, columns: int, *, shown: int) -> int:
    """Return the bytes of torch's own kernel.

    These are the last group's input and columns, or all results a second time.
    """
    return columns if one.groups == 1 else max(columns + byte_count(one.source) // one.groups, shown)


def _input_passes(one: _Convolution, gradient: Tensor) -> list[tuple[int, ...]]:
    """Return the blocks of each pass for the input's gradient."""
    source = byte_count(one.source)
    if not one.fills(_HALF_BLOCK):
        return [(source, source)]
    if one.channels_last_inside and not one.transposed:
        return [(source, byte_count(gradient), byte_count(one.weight), one.images), (source, source, source)]
    copy = _blocked(one.source)
    return [(copy, _gradient_copy(one, gradient), _blocked_weight(one.weight)), (source, copy)]


def _weight_pass(one: _Convolution, gradient: Tensor) -> tuple[int, ...]:
    """Return copies of both operands and the weight; in half precision also the float32 sums."""
    channels = one.source.shape[1]
    few = one.few and (one.half or channels < _FEWEST)
    block = _HALF_BLOCK if channels <= _HALF_BLOCK and one.groups == 1 and not (one.point or one.half) else _BLOCK
    weight = _blocked_weight(one.weight, few=few, block=block)
    sums = 2 * weight + (0 if one.point else _images(one)) if one.half else 0
    return weight, _gradient_copy(one, gradient), 0 if few else _blocked(one.source, block=block), sums, one.image


def _output_copy(one: _Convolution) -> int:
    """Return the bytes of the result in blocks.

    That of a transposed convolution with strides and few channels is written as it is.
    """
    if not (one.transposed and one.images):
        return _blocked(one.output)
    return byte_count(one.output) if one.narrow < _FEWEST else _blocked(one.output, block=_HALF_BLOCK)


def _gradient_copy(one: _Convolution, gradient: Tensor) -> int:
    """Return the bytes of the gradient in blocks.

    That of a transposed convolution with few channels is read as it is.
    """
    if not one.transposed or one.groups > 1:
        return _blocked(gradient)
    if one.half:
        return 0 if one.narrow < _BLOCK else _blocked(gradient)
    if one.narrow > _HALF_BLOCK:
        return _blocked(gradient)
    return 0 if one.narrow < _FEWEST else _blocked(gradient, block=_HALF_BLOCK)


def _images(one: _Convolution) -> int:
    """Return the bytes of one transposed image of each operand, for half-precision products.

    It is 0 in float32 and for single channels.
    """
    if not one.half or one.weight.shape[1] == 1:
        return 0
    source = byte_count(one.source) if one.few else _blocked(one.source)
    return (source + _gradient_copy(one, one.output)) // one.source.shape[0]


def _weight_of_channels_last(one: _Convolution, *, most: int) -> int:
    """Return the bytes of a weight in blocks of each group, and of its copy in channels-last layout.

    Wide groups take the blocks `most` times.
    """
    if one.depthwise or one.half:
        return _blocked_weight(one.weight)
    out, into = one.weight.shape[0] // one.groups, one.weight.shape[1]
    each = byte_count(one.weight) // (one.weight.shape[0] * into)
    blocked = one.groups * rounded_up(out, _BLOCK) * rounded_up(into, _BLOCK) * each
    copied = 0 if is_channels_last(one.weight) or one.point else byte_count(one.weight)
    return copied + (most if min(out, into) >= _BLOCK else 1) * blocked


def _weight_gradient_of_channels_last(one: _Convolution) -> int:
    """Return the bytes of the weight and its gradient in blocks; a depth-wise one has a block for each channel."""
    if one.half:
        return 3 * _blocked_weight(one.weight)
    if one.direct:
        return 2 * _blocked_weight(one.weight)
    return byte_count(one.weight) * _BLOCK**2 if one.depthwise else _weight_of_channels_last(one, most=2)


def _made_contiguous(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else byte_count(tensor)


def _blocked(tensor: Tensor, *, block: int = _BLOCK) -> int:
    channels = max(tensor.shape[1], 1)
    return byte_count(tensor) // channels * rounded_up(channels, block)


def _blocked_weight(weight: Tensor, *, few: bool = False, block: int = _BLOCK) -> int:
    out, into = weight.shape[:2]
    rows = byte_count(weight) // out * rounded_up(out, _BLOCK)
    return rows if few or into == 1 else rows // into * rounded_up(into, block)
