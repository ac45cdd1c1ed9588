"""Triton kernels of the cross-entropy: one program for each row of logits.

A row of 50,000 logits in bfloat16 takes 100 KB. torch's operators read and write it in float32 about ten times. `losses_of_rows` reads
it once, with the running maximum and sum of an online softmax; `gradient_of_rows` reads and writes it once. `losses_and_gradient_of_rows`
does both: the second reading of a row comes from the cache.

Reference:
    M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
"""

# ruff: noqa: ANN001, ANN202  Triton compiles the functions and has types of its own
# pyright: reportMissingImports=false, reportIndexIssue=false
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gradient_of_rows", "losses_and_gradient_of_rows", "losses_of_rows"]

_IGNORED = tl.constexpr(-100)
_BLOCK = 4096  # entries a program holds at one time: 4 KB to 16 KB in registers, spread over 8 warps
_WARPS = 8


@triton.jit
def _log_sum(start, columns, BLOCK: tl.constexpr):
    greatest = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(start + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(greatest, tl.max(values, 0))
        total = total * tl.exp(greatest - higher) + tl.sum(tl.exp(values - higher), 0)
        greatest = higher
    return greatest + tl.log(total)


@triton.jit
def _loss(start, label, log_sum, columns):
    offered = (label >= 0) & (label < columns)  # any other label is an error, which the caller reports
    target = tl.load(start + label, mask=offered, other=float("nan")).to(tl.float32)
    return tl.where(label != _IGNORED, log_sum - target, 0.0)


@triton.jit
def _write_gradient(start, label, log_sum, factor, columns, BLOCK: tl.constexpr):
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < columns
        values = tl.load(start + places, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = (tl.exp(values - log_sum) - tl.where(places == label, 1.0, 0.0)) * factor
        gradient = tl.where(label == _IGNORED, 0.0, gradient)
        tl.store(start + places, gradient.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _losses(logits, labels, losses, log_sums, columns, row_stride, label_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, label = logits + row * row_stride, tl.load(labels + row * label_stride)
    log_sum = _log_sum(start, columns, BLOCK)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, _loss(start, label, log_sum, columns))


@triton.jit
def _gradient(logits, labels, log_sums, outer, columns, row_stride, label_stride, outer_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(outer + row * outer_stride).to(tl.float32)
    start, label = logits + row * row_stride, tl.load(labels + row * label_stride)
    _write_gradient(start, label, tl.load(log_sums + row), factor, columns, BLOCK)


@triton.jit
def _losses_and_gradient(logits, labels, losses, columns, row_stride, label_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, label = logits + row * row_stride, tl.load(labels + row * label_stride)
    log_sum = _log_sum(start, columns, BLOCK)
    tl.store(losses + row, _loss(start, label, log_sum, columns))
    tl.debug_barrier()  # the gradient overwrites the logit that the loss reads
    _write_gradient(start, label, log_sum, 1.0, columns, BLOCK)


def losses_of_rows(logits: Tensor, labels: Tensor, losses: Tensor, log_sums: Tensor) -> None:
    """Write each row's loss and log-sum-exp.

    Shapes: (N, V), (N), (N), (N). The last two tensors are contiguous and in float32. Entries of a row of logits lie
    side by side.
    """
    shape = (logits.shape[1], logits.stride(0), labels.stride(0))
    _losses[(len(logits),)](logits, labels, losses, log_sums, *shape, BLOCK=_BLOCK, num_warps=_WARPS)


def gradient_of_rows(logits: Tensor, labels: Tensor, log_sums: Tensor, outer: Tensor) -> None:
    """Overwrite logits (N, V) by the gradient of the losses' sum, each weighted by `outer` (N).

    `outer` may have any stride: the gradient of a sum is one number, expanded.
    """
    shape = (logits.shape[1], logits.stride(0), labels.stride(0), outer.stride(0))
    _gradient[(len(logits),)](logits, labels, log_sums, outer, *shape, BLOCK=_BLOCK, num_warps=_WARPS)


def losses_and_gradient_of_rows(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Write each row's loss, and overwrite logits (N, V) by the gradient of the losses' sum.

    `losses` (N) is contiguous and in float32.
    """
    shape = (logits.shape[1], logits.stride(0), labels.stride(0))
    _losses_and_gradient[(len(logits),)](logits, labels, losses, *shape, BLOCK=_BLOCK, num_warps=_WARPS)
