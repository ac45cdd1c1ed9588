"""Run linear layers, dropout and RMS normalisation as the target's kernels do.

Autograd then saves the tensors it would save on the target.

- Linear: CUDA and ROCm add the bias in place if product and bias are not one kernel: for non-contiguous inputs of three
  dimensions, and for inputs of four and more. On fake tensors torch would add it out of place. Source: `linear` in torch's
  `native/Linear.cpp`; an H200's allocations under torch 2.11.
- Dropout: the CPU and MPS save a noise tensor of the input's dtype; CUDA's fused kernel saves a mask of one byte an entry.
  Source: `is_fused_kernel_acceptable` and `_dropout_impl` in torch's `native/Dropout.cpp`. Dropout of whole channels, alpha
  dropout and the in-place forms are the same on every backend.
- Affine grids: the product inside is lowered by autocast, and so is its result.
- One-hot rows: torch scatters ones into zeros, but compares on fake tensors. Source: `one_hot` in torch's `native/Onehot.cpp`.
- RMS normalisation: CUDA and MPS run one kernel, which saves its input, its weight and one float32 a row. The CPU runs a
  chain of operations, which saves three tensors as large as the input. Source: the dispatch of `_fused_rms_norm` in torch's
  `native_functions.yaml` (composite everywhere but on CUDA and MPS); not run on hardware.

Batch and group normalisation save statistics of a few bytes a channel on every backend and need no rule.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override

__all__ = ["bias_in_place", "fused_dropout", "fused_rms_norm", "lowered_affine_grid", "scattered_one_hot"]

_MATRIX = 2
_ROWS_OF_POSITIONS = 3


def bias_in_place(plain: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    """Run a linear layer as CUDA and ROCm do; `plain` if product and bias are one kernel."""
    one_kernel = input.dim() == _MATRIX or (input.dim() == _ROWS_OF_POSITIONS and input.is_contiguous())
    if bias is None or one_kernel or input.dim() < _MATRIX:
        return plain(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def fused_dropout(plain: Callable[..., Any], input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:  # noqa: A002 - torch's name
    """Run dropout as CUDA and ROCm do; `plain` if the fused kernel does not apply."""
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train=True)[0]
    return plain(input, p, train)


def fused_rms_norm(
    plain: Callable[..., Any],
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run RMS normalisation as one kernel.

    Run `plain` if the weight has another dtype, as torch does.
    """
    if weight is not None and weight.dtype is not input.dtype:
        return plain(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, math.prod(normalized_shape))  # pyright: ignore[reportReturnType]


def scattered_one_hot(plain: Callable[..., Any], tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Scatter ones into zeros; `plain` if the number of classes hangs on values."""
    if num_classes < 1 or not tensor.numel():
        return plain(tensor, num_classes)
    return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def lowered_affine_grid(plain: Callable[..., Any], theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Make a grid in autocast's precision; `plain` without autocast."""
    if not torch.is_autocast_enabled("cpu"):
        return plain(theta, size, align_corners)
    rows, _, *sides = size
    base = torch.empty(rows, math.prod(sides), len(sides) + 1, dtype=theta.dtype)
    return torch.bmm(base, theta.transpose(1, 2)).view(rows, *sides, len(sides))


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates and saves the kernel's tensors; their values are empty."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, *args: Any) -> Tensor:
        source, weight, width = args
        root = source.new_empty(source.numel() // max(width, 1), dtype=torch.float32)
        ctx.save_for_backward(source, weight, root)
        return torch.empty_like(source)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source), None if weight is None else torch.empty_like(weight), None
