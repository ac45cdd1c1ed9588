"""Memory inside CPU kernels: copies of operands in another dtype or layout.

Source: torch's profiler on one AVX-512 machine (torch 2.13, one thread); the tests measure every figure again. Not modelled,
because below a few MiB for all sizes: attention's buffers of each thread, statistics of normalisations.
"""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from lightning_unified.cost_model.backends.kernel_memory.calls import FLOAT, HALF, Call, Repair, byte_count
from lightning_unified.cost_model.backends.kernel_memory.cpu_convolution import (
    cpu_convolution,
    cpu_convolution_backward,
)
from lightning_unified.cost_model.backends.kernel_memory.packed_products import packed_product

__all__ = ["CPU_TEMPORARIES", "averaged_losses", "mixed_operands"]

_MEAN = 1  # torch's number of a loss's reduction
_REDUCTIONS = {
    "aten.mse_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 2,
    "aten.soft_margin_loss": 2,
    "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}  # index of the argument that names the reduction
_CHOOSES = ("aten.where", "aten.masked_fill", "aten.masked_fill_")  # their mask takes no part in type promotion


def mixed_operands(name: str, call: Call) -> int:
    """Return the bytes of a pointwise operation's copies of operands in its common dtype.

    CUDA converts inside the kernel; a CPU copies first, and copies the result if it is written into a narrower tensor.
    """
    operands = [each for each in call.args if isinstance(each, Tensor) and each.dim() > 0]
    if name in _CHOOSES or len({each.dtype for each in operands}) < 2:
        return 0
    common = reduce(torch.promote_types, (each.dtype for each in operands))
    copied = sum(each.numel() for each in operands if each.dtype is not common)
    in_place = name.endswith("_") and call.args[0].dtype is not common
    return (copied + in_place * call.args[0].numel()) * common.itemsize


def averaged_losses(name: str, call: Call) -> int:
    """Return the bytes of the float32 copy that averaging half-precision losses makes."""
    reduction = _REDUCTIONS.get(name)
    averages = reduction is not None and call.args[reduction] == _MEAN and call.results[0].dtype in HALF
    return call.args[0].numel() * FLOAT if averages else 0


def _mean(call: Call) -> int:
    """Return the bytes of a float32 copy of a half-precision input."""
    return call.args[0].numel() * FLOAT if call.args[0].dtype in HALF else 0


def _sum(call: Call) -> int:
    """Return the bytes of a copy of the input in the requested dtype; 0 without a conversion."""
    return (
        call.args[0].numel() * call.results[0].element_size() if call.results[0].dtype is not call.args[0].dtype else 0
    )


def _batch_norm_backward(call: Call) -> int:
    """Return the bytes of a second copy of the input's gradient."""
    return byte_count(call.args[0])


def _upsample(call: Call) -> int:
    """Return the bytes of channels-last copies of input and output; 0 if they have that layout."""
    source, output = call.args[0], call.results[0]
    return 0 if not source.is_contiguous() else byte_count(source) + byte_count(output)


CPU_TEMPORARIES: Mapping[str, Repair] = {
    "aten.convolution": cpu_convolution,
    "aten.convolution_backward": cpu_convolution_backward,
    "aten.mm": packed_product,
    "aten.bmm": packed_product,
    "aten.addmm": packed_product,
    "aten.baddbmm": packed_product,
    "aten.native_batch_norm_backward": _batch_norm_backward,
    "aten.mean": _mean,
    "aten.sum": _sum,
    "aten.upsample_nearest2d": _upsample,
    "aten.upsample_bilinear2d": _upsample,
}
