"""The copies that convolution kernels of CUDA make of their operands.

Tensor cores of cuDNN compute in channels-last layout only, for half precision and, with TF32 allowed, float32: judgement from the
kernels it names, not run on hardware. Operands in channels-last layout are not copied.
"""

import torch
from torch import Tensor

from lightning_unified.planning.backends.calls import Call, byte_count

__all__ = ["cuda_convolution", "cuda_convolution_backward", "is_channels_last"]

_HALF = (torch.float16, torch.bfloat16)


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
    return tensor_cores and not is_channels_last(source)


def is_channels_last(source: Tensor) -> bool:
    """Return whether a tensor of images lies in memory with its channels last, and not in torch's default order."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(source.dim())
    return layout is not None and source.is_contiguous(memory_format=layout) and not source.is_contiguous()
