"""Move weights out of the segments that they were loaded into, before segments expand."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_unified.nn.cuda_graphs import graphs_exist, owns_memory

__all__ = ["move_weights"]

# torch's CUDACachingAllocator.cpp, `kSmallSize` and `kMinLargeAlloc`: blocks of sizes between share segments of 20 MiB. Two weights of 9 MiB leave
# 2 MiB of one without use. Smaller and larger blocks waste little.
_SHARED = range(2**20 + 1, 10 * 2**20)
_PORTION = 256 * 2**20  # judgement: bytes that are held twice before the old segments are freed


def move_weights(module: nn.Module, device: torch.device) -> None:
    """Copy parameters and buffers on a CUDA device into new memory, and free the old.

    A tensor moves if it shares a segment with others and no other tensor uses its memory. Nothing moves if a CUDA graph exists, because it
    holds the addresses. If memory runs out, the remaining tensors stay. Neighbours move together, so that whole segments become free.

    Args:
        module: The module. Its parameters stay the same objects, so that optimizers keep them.
        device: The device; tensors elsewhere stay.
    """
    if graphs_exist():
        return
    left: list[Tensor] = []  # old memory that copies must not go to
    for one in sorted(_movable(module, device), key=Tensor.data_ptr):
        try:
            copy = one.data.clone()
        except torch.OutOfMemoryError:
            break
        left.append(one.data)
        one.data = copy
        if sum(old.nbytes for old in left) >= _PORTION:
            left.clear()
            torch.cuda.empty_cache()
    left.clear()
    torch.cuda.empty_cache()


def _movable(module: nn.Module, device: torch.device) -> Iterator[Tensor]:
    for one in (*module.parameters(), *module.buffers()):
        is_plain = type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided and one.device == device
        if is_plain and one.nbytes in _SHARED and owns_memory(one):
            yield one
