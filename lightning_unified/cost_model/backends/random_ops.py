"""Dropout as the target keeps it for the backward pass.

The CPU and MPS multiply by a noise tensor of the input's dtype; CUDA's fused kernel keeps a mask of one byte an entry.

Source: `is_fused_kernel_acceptable` and `_dropout_impl` in torch's `native/Dropout.cpp`. Dropout of whole channels, alpha dropout and the
in-place forms are the same everywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_dropout"]


def fused_dropout(plain: Callable[..., Any], input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:  # noqa: A002 - torch's name
    """Run dropout as CUDA and ROCm do, `plain` where the fused kernel does not apply."""
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train=True)[0]
    return plain(input, p, train)
