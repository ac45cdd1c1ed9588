"""Properties of the GPU on which kernels depend; those of an H200 if no GPU is present."""

import torch

__all__ = ["generation", "multiprocessors"]

_HOPPER = 9
_H200 = 132


def generation() -> int:
    """Return the major compute capability."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else _HOPPER


def multiprocessors() -> int:
    """Return the number of multiprocessors."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else _H200
