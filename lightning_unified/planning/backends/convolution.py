"""The copies that convolution kernels make of their operands, on a CPU and on CUDA.

Neither library computes in the row of channels, height and width that torch's default layout is. Operands are copied to the library's
layout and results back, and each pass takes the greatest sum of what lives at once. Operands in channels-last layout are not copied.

CPU: oneDNN, channels rounded up to 16; measured per call on one AVX-512 machine (torch 2.13, float32 and bfloat16, 1 to 3 dimensions,
strided, grouped, transposed); exact for most shapes in float32, within 10 % otherwise. CUDA: tensor cores of cuDNN compute in
channels-last only, for half precision and, with TF32 allowed, float32: judgement from the kernels it names, not run on hardware.
"""

from math import prod

import torch
from torch import Tensor

from lightning_unified.planning.backends.calls import Call, byte_count

__all__ = ["cpu_convolution", "cpu_convolution_backward", "cuda_convolution", "cuda_convolution_backward"]

_BLOCK = 16
_FEWEST_CHANNELS = 4  # oneDNN reads and writes fewer channels as they are
_HALF_WEIGHT_COPIES = 3  # of half-precision weights' gradients: one, and one in float32
_HALF = (torch.float16, torch.bfloat16)


def cpu_convolution(call: Call) -> int:
    """Return what oneDNN takes on top of the output: copies of input, weight and output, then the output twice."""
    source, weight, transposed, (output,) = call.args[0], call.args[1], call.args[6], call.results
    if _is_plain_product(weight, transposed):
        return 0
    if _channels_last(source):
        return _blocked_weight(weight)
    copies = _blocked_input(source) + _blocked_weight(weight) + _blocked(output)
    copied = (3 if transposed else 2) * byte_count(output)
    return max(copies, copied) - byte_count(output) + _made_contiguous(source)


def cpu_convolution_backward(call: Call) -> int:
    """Return what oneDNN takes on top of the gradients, the greater of its two passes."""
    gradient, source, weight, transposed, mask = call.args[0], call.args[1], call.args[2], call.args[7], call.args[10]
    if _is_plain_product(weight, transposed):
        return 0
    copies = _HALF_WEIGHT_COPIES if weight.dtype in _HALF else 1
    weights = _blocked_weight(weight)
    if _channels_last(source):
        return max(copies, 2) * weights
    of_input = byte_count(source) if mask[0] else 0
    input_pass = _blocked(gradient) + weights + _blocked_input(source) if mask[0] else 0
    weight_pass = of_input + _blocked_input(source) + _blocked(gradient) + copies * weights
    last = of_input + 2 * weights
    shown = sum(byte_count(result) for result in call.results)
    return max(max(input_pass, weight_pass, last) - shown, 0) + _made_contiguous(gradient) + _made_contiguous(source)


def cuda_convolution(call: Call) -> int:
    """Return the channels-last copies that cuDNN keeps in its workspace."""
    source, weight = call.args[0], call.args[1]
    if not _transposes(source):
        return 0
    return byte_count(source) + byte_count(weight) + byte_count(call.results[0])


def cuda_convolution_backward(call: Call) -> int:
    """Return the channels-last copies of the larger of cuDNN's two passes; both have gradient, input and weight."""
    gradient, source, weight = call.args[0], call.args[1], call.args[2]
    if not _transposes(source):
        return 0
    return byte_count(gradient) + byte_count(source) + byte_count(weight)


def _transposes(source: Tensor) -> bool:
    tensor_cores = source.dtype in _HALF or (source.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    return tensor_cores and not _channels_last(source)


def _channels_last(source: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(source.dim())
    return layout is not None and source.is_contiguous(memory_format=layout) and not source.is_contiguous()


def _made_contiguous(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else byte_count(tensor)


def _is_plain_product(weight: Tensor, transposed: bool) -> bool:
    """A float32 kernel of one point is a matrix product on the plain layout."""
    return weight.dtype is torch.float32 and not transposed and prod(weight.shape[2:]) == 1


def _blocked_input(source: Tensor) -> int:
    return _blocked(source) if source.shape[1] >= _FEWEST_CHANNELS else 0


def _blocked(tensor: Tensor) -> int:
    if tensor.shape[1] < _FEWEST_CHANNELS:
        return byte_count(tensor)
    return byte_count(tensor) // max(tensor.shape[1], 1) * _rounded(tensor.shape[1])


def _blocked_weight(weight: Tensor) -> int:
    out, into = weight.shape[:2]
    if into == 1 or into < _FEWEST_CHANNELS:
        return byte_count(weight)
    return byte_count(weight) // (out * into) * _rounded(out) * _rounded(into)


def _rounded(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK
