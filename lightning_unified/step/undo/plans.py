"""Copy tensors fast before a step: small ones stacked, others into reused memory."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.step.undo.walk import FoundTensor
from lightning_unified.units import KIB, MIB

__all__ = ["SMALL", "CopyBuffers", "Plan", "bytes_of", "is_plain", "kind_of_tensor"]

SMALL = 64 * KIB  # largest tensor that is copied before every step, in bytes
_STACK = MIB  # largest stack, in bytes: allocators keep small blocks apart from those of activations
_SPARE = 64  # unused buffers that are kept, for shapes that come and go
_FEW = 4  # from this number of tensors of a kind, a call of their own is quicker

kind_of_tensor = operator.attrgetter("shape", "dtype", "device")
_dtype = operator.attrgetter("dtype")


class CopyBuffers:
    """Buffers for copies, reused for tensors of the same shape, dtype and device."""

    def __init__(self) -> None:
        self._buffers: dict[Any, list[Tensor]] = {}
        self._used: dict[Any, int] = {}

    def begin(self) -> None:
        """Make all buffers available again, and drop unused ones once there are many.

        A buffer is unused if the last note did not take it.
        """
        total, used = sum(map(len, self._buffers.values())), sum(self._used.values())
        if total > 2 * used + _SPARE:
            self._buffers = {kind: self._buffers[kind][:count] for kind, count in self._used.items()}
        self._used = {}

    def keep(self, buffers: Iterable[Tensor]) -> None:
        """Drop all buffers but these, which the next note reuses.

        The memory that is held between two steps then stays the same.
        """
        self._buffers = {}
        for buffer in buffers:
            self._buffers.setdefault(kind_of_tensor(buffer), []).append(buffer)
        self._used = {kind: len(kept) for kind, kept in self._buffers.items()}  # none of them is unused

    def take(self, tensor: Tensor) -> Tensor:
        """Return a buffer for a copy of `tensor`."""
        kind = kind_of_tensor(tensor)
        buffers, index = self._buffers.setdefault(kind, []), self._used.get(kind, 0)
        self._used[kind] = index + 1
        if index == len(buffers):
            with torch.inference_mode(mode=False), torch.no_grad():
                buffers.append(torch.empty_like(tensor, requires_grad=False))
        return buffers[index]


class _Stack:
    """Small tensors of one shape, dtype and device, copied into one tensor by one call.

    This takes a tenth of the time of a `clone` for each tensor.

    Args:
        most: Number of tensors that it may have.
    """

    __slots__ = ("_buffer", "_copies", "entries", "most", "tensors")

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: list[FoundTensor] = []
        self.tensors: list[Tensor] = []
        self._buffer: Tensor | None = None
        self._copies: Tensor | Sequence[Tensor] = ()

    def reserve(self) -> None:
        """Allocate a buffer that every copy reuses."""
        first = self.tensors[0]
        with torch.inference_mode(mode=False):
            self._buffer = torch.empty((len(self.tensors), *first.shape), dtype=first.dtype, device=first.device)

    def fits(self) -> bool:
        """Return whether the buffer fits the dtype of all tensors and the shape of the first.

        `copy` finds other shapes: `torch.stack` raises, and the tensors are cloned.
        """
        first, buffer = self.tensors[0], self._buffer
        return (
            buffer is not None
            and buffer.shape[1:] == first.shape
            and all(map(operator.is_, map(_dtype, self.tensors), itertools.repeat(buffer.dtype)))
        )

    def copy(self) -> None:
        """Copy every tensor."""
        try:
            if self._buffer is None:
                self._copies = torch.stack(self.tensors).detach()  # `torch.no_grad` takes longer
            else:
                self._copies = torch.stack(self.tensors, out=self._buffer)
        except RuntimeError:  # the tensors have different shapes or devices by now
            self._copies = [tensor.detach().clone() for tensor in self.tensors]

    def pairs(self) -> Iterator[tuple[FoundTensor, Tensor]]:
        """Return the tensors, each with its copy."""
        return zip(self.entries, self._copies, strict=True)


class Plan:
    """Tensors with buffers for their copies, and tensors that are held without a copy.

    Attributes:
        copied: Tensors with a buffer of their own.
        buffers: The buffer of each.
        held: Tensors without a copy.
        large_bytes: Bytes of the copies of large tensors that may change.
    """

    def __init__(self) -> None:
        self.copied: list[FoundTensor] = []
        self.buffers: list[Tensor] = []
        self.held: list[FoundTensor] = []
        self.large_bytes = 0
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._stacks: list[_Stack] = []
        self._stack_of: dict[Any, _Stack] = {}
        self._is_kept = False

    def add(self, entry: FoundTensor, buffer: Tensor) -> None:
        """Plan a copy of `entry` into `buffer`."""
        kind = kind_of_tensor(entry.tensor)
        self.copied.append(entry)
        self.buffers.append(buffer)
        self._tensors.append(entry.tensor)
        self._kinds.append(kind)
        buffers, tensors = self._groups.setdefault(kind[1:], ([], []))
        buffers.append(buffer)
        tensors.append(entry.tensor)

    def stack(self, entry: FoundTensor) -> bool:
        """Plan a copy of `entry` in one stack with tensors of its kind, if possible.

        It is possible for a small, contiguous tensor of torch's own classes. The return value says whether the copy is planned.
        """
        tensor = entry.tensor
        is_own = type(tensor) is Tensor or type(tensor) is nn.Parameter
        if not is_own or tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_contiguous():
            return False
        kind = kind_of_tensor(tensor)
        stack = self._stack_of.get(kind)
        if stack is None or len(stack.tensors) == stack.most:
            size = bytes_of(tensor)
            if size > SMALL or not is_plain(tensor):
                return False
            stack = self._stack_of[kind] = _Stack(_STACK // max(size, 1))
            self._stacks.append(stack)
        stack.entries.append(entry)
        stack.tensors.append(tensor)
        return True

    def keep(self, buffers: CopyBuffers) -> None:
        """Reserve memory that every copy reuses.

        Tensors of rare kinds get buffers of their own, and one call copies all of the same dtype and device.
        """
        self._is_kept = True
        for stack in self._stacks:
            if len(stack.entries) < _FEW:
                for entry in stack.entries:
                    self.add(entry, buffers.take(entry.tensor))
            else:
                stack.reserve()
        self._stacks = [stack for stack in self._stacks if len(stack.entries) >= _FEW]

    def fits(self) -> bool:
        """Return whether the tensors still have the shapes and dtypes of their buffers."""
        return list(map(kind_of_tensor, self._tensors)) == self._kinds and all(stack.fits() for stack in self._stacks)

    def copy(self) -> None:
        """Copy every tensor."""
        if not self._groups and not self._is_kept:
            self._copy_stacks()
        elif self._groups or self._stacks:
            with torch.no_grad():
                self._copy_stacks()
                for buffers, tensors in self._groups.values():
                    torch._foreach_copy_(buffers, tensors)  # pyright: ignore[reportPrivateImportUsage]

    def pairs(self) -> list[tuple[FoundTensor, Tensor]]:
        """Return the tensors that are copied, each with its copy."""
        small = (stack.pairs() for stack in self._stacks)
        return [*zip(self.copied, self.buffers, strict=True), *itertools.chain.from_iterable(small)]

    def _copy_stacks(self) -> None:
        for stack in self._stacks:
            stack.copy()


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` has entries of its own that can be copied.

    It must be dense and on a real device, and its class must not wrap other tensors.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        and (isinstance(tensor, FakeTensor) or not is_traceable_wrapper_subclass(tensor))
    )


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the entries of `tensor`."""
    return tensor.numel() * tensor.element_size()
