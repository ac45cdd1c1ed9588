"""A linear layer's bias, which is added in place where the product is not one kernel with it.

That is so for an input of three dimensions that does not lie in a row, and of four and more. Torch leaves it out of place for tensors that
are not of a device, as fake ones are. Source: `linear` in torch's `native/Linear.cpp`; an H200's allocations under torch 2.11.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["bias_in_place"]

_MATRIX = 2
_ROWS_OF_POSITIONS = 3


def bias_in_place(plain: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    """Run a linear layer as CUDA and ROCm do, `plain` where it is one kernel."""
    one_kernel = input.dim() == _MATRIX or (input.dim() == _ROWS_OF_POSITIONS and input.is_contiguous())
    if bias is None or one_kernel or input.dim() < _MATRIX:
        return plain(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)
