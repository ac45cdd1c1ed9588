"""Root-mean-square normalisation, which CUDA and MPS run as one kernel and the CPU as a chain of them.

The kernel keeps its input, its weight and one float32 a row; the chain keeps three tensors as large as the input.
Source: the dispatch of `_fused_rms_norm` in torch's `native_functions.yaml`: composite everywhere but CUDA and MPS. Not run on hardware.
Batch and group normalisation keep statistics of a few bytes a channel whatever the backend: nothing is done about them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override

__all__ = ["fused_rms_norm"]


def fused_rms_norm(
    plain: Callable[..., Any],
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run the normalisation as one kernel; `plain` where the weight has another dtype, as torch does then."""
    if weight is not None and weight.dtype is not input.dtype:
        return plain(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, math.prod(normalized_shape))  # pyright: ignore[reportReturnType]


class _FusedRmsNorm(torch.autograd.Function):
    """Takes and keeps what the kernel takes and keeps; its values are empty."""

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
