"""Who relies on addresses of memory: CUDA graphs, and tensors that share it."""

import gc

import torch
from torch import Tensor

__all__ = ["graphs_exist", "owns_memory", "users"]


def graphs_exist() -> bool:
    """Return whether any CUDA graph exists in this process.

    A graph holds the addresses of all memory that its kernels use: tensors, and workspaces of libraries.
    """
    return any(issubclass(kind, torch.cuda.CUDAGraph) for kind in set(map(type, gc.get_objects())))


def users(tensor: Tensor) -> int:
    """Return the number of tensors that use the memory of `tensor`, plus a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]  # torch/_inductor/cudagraph_trees.py


def owns_memory(tensor: Tensor) -> bool:
    """Return whether a tensor takes all of its memory, and no other tensor uses it."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and users(tensor) == users(torch.empty(1))
