"""Transforms of `torch.func` around a call, such as `vmap` and `grad`."""

import torch

__all__ = ["in_a_transform"]


def in_a_transform() -> bool:
    """Return whether a transform of `torch.func` runs.

    Its tensors take no autograd functions or tensor subclasses of this package.
    """
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
