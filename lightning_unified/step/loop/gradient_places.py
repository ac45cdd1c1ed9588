"""Gradients of split batches that keep their memory from step to step."""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unified.nn.cuda_graphs import owns_memory, users

__all__ = ["GradientPlaces"]

_SMALL = 2**20  # bytes; torch's CUDACachingAllocator.cpp, `kSmallSize`: smaller blocks have pages of their own
_PLAIN = (Tensor, nn.Parameter)  # other classes, such as DTensor, may have sums of their own


class GradientPlaces:
    """Lets the first micro-batch of a batch add its gradients to the memory of the gradients before.

    `zero_grad` frees gradients, and a backward pass makes new ones in memory that activations leave. There they divide the memory for the
    rest of a split batch, so that an allocator reserves more. In the same memory, filled with zeros, they do not. All micro-batches but the
    first find memory for all gradients anyway, so the peak is the same.

    A parameter has no gradient between `zero_grad` and the backward pass, and after a pass that computes none for it. Memory that
    anything else uses is freed as without this class.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, Tensor]] = []
        self._given: list[tuple[Tensor, int]] = []
        self._packed: set[int] = set()

    def zero(self, zero_grad: Callable[[], None], parameters: Sequence[Tensor]) -> None:
        """Call `zero_grad`, and keep the memory of the gradients of `parameters` that it drops."""
        held = [(one, one.grad) for one in parameters if one.grad is not None]
        zero_grad()
        alone = _own_references()
        self._free = []
        while held:
            one, gradient = held.pop()
            if one.grad is None and _is_plain(gradient) and _references([gradient]) == alone:
                self._free.append((one, gradient))

    def give(self) -> None:
        """Give parameters without a gradient the kept memory, filled with zeros.

        Call it before the first backward pass.
        """
        free, self._free = [pair for pair in self._free if pair[0].grad is None], []
        if free:
            torch._foreach_zero_([gradient for _, gradient in free])  # pyright: ignore[reportPrivateImportUsage]
        for one, gradient in free:
            one.grad = gradient
        self._given = [(one, gradient._version) for one, gradient in free]

    def settle(self) -> None:
        """Take the memory back from parameters that got no gradient in the backward pass."""
        for one, version in self._given:
            if one.grad is not None and one.grad._version == version:
                one.grad = None
        self._given = []

    def forget(self) -> None:
        """Free kept memory that no backward pass has used."""
        self._free, self._given = [], []

    def pack(self, optimizer: Optimizer) -> None:
        """Move gradients and optimizer state to lower addresses.

        The first ones lie where activations have been, with gaps between them. They stay the same tensors. If memory runs out, the remaining
        ones stay where they are. Nothing moves if most gradients are where an earlier call left them.
        """
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in trained if one.grad is not None and _is_plain(one.grad)]
        new = sum(one.nbytes for one in gradients if one.data_ptr() not in self._packed)
        if 2 * new <= sum(one.nbytes for one in gradients):
            return
        states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        beside = (
            one for one in states if isinstance(one, Tensor) and _is_plain(one) and one.device == gradients[0].device
        )
        _move_down([*gradients, *beside])
        self._packed = {one.data_ptr() for one in gradients}


def _move_down(tensors: Sequence[Tensor]) -> None:
    """Move large tensors whose memory nothing else uses to lower addresses."""
    _release()
    left: list[Tensor] = []  # old memory that copies must not go to
    for one in sorted(tensors, key=Tensor.data_ptr, reverse=True):
        if one.nbytes <= _SMALL or not owns_memory(one):
            continue
        try:
            copy = one.data.clone()
        except torch.OutOfMemoryError:
            break
        if copy.data_ptr() < one.data_ptr():
            left.append(one.data)
            one.data = copy
    left.clear()
    _release()


def _release() -> None:
    """Return unused pages, so that copies go to the lowest addresses."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_plain(one: Tensor) -> bool:
    """Return whether a tensor is one of torch's own, without attributes that may describe its memory."""
    return type(one) in _PLAIN and one.layout == torch.strided and not one.requires_grad and not vars(one)


def _own_references() -> tuple[int, int]:
    """Return what `_references` returns for a tensor that one variable holds."""
    held = torch.empty(1)
    return _references([held])


def _references(one: list[Tensor]) -> tuple[int, int]:
    """Return the number of references to the tensor in the list, and of tensors that use its memory."""
    return sys.getrefcount(one[0]), users(one[0])
