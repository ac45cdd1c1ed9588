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

__all__ = ["SMALL", "Plan", "Rooms", "bytes_of", "is_plain", "kind_of_tensor"]

SMALL = 64 * KIB  # a tensor of at most so many bytes is copied before every step
_STACK = MIB  # bytes of a stack at most: allocators keep small blocks apart from those of activations
_SPARE = 64  # rooms that may lie unused: of shapes that come and go
_FEW = 4  # tensors of a kind from which on a call of their own is quicker

kind_of_tensor = operator.attrgetter("shape", "dtype", "device")
_dtype = operator.attrgetter("dtype")


class Rooms:
    """Tensors to copy others into, used again by whatever has the same shape, dtype and device."""

    def __init__(self) -> None:
        self._rooms: dict[Any, list[Tensor]] = {}
        self._used: dict[Any, int] = {}

    def begin(self) -> None:
        """Let all rooms be used again; drop those that the last note had no use for, once they are many."""
        total, used = sum(map(len, self._rooms.values())), sum(self._used.values())
        if total > 2 * used + _SPARE:
            self._rooms = {kind: self._rooms[kind][:count] for kind, count in self._used.items()}
        self._used = {}

    def keep(self, rooms: Iterable[Tensor]) -> None:
        """Drop all but these rooms, which the next note uses again: what lives between two steps stays the same."""
        self._rooms, self._used = {}, {}
        for room in rooms:
            self._rooms.setdefault(kind_of_tensor(room), []).append(room)

    def take(self, tensor: Tensor) -> Tensor:
        """Return a room for `tensor`."""
        kind = kind_of_tensor(tensor)
        rooms, index = self._rooms.setdefault(kind, []), self._used.get(kind, 0)
        self._used[kind] = index + 1
        if index == len(rooms):
            with torch.inference_mode(mode=False), torch.no_grad():
                rooms.append(torch.empty_like(tensor, requires_grad=False))
        return rooms[index]


class _Stack:
    """Small tensors of one shape, dtype and device, which one call copies into one tensor: a tenth of the time of a clone each.

    Args:
        most: Number of tensors that it may have.
    """

    __slots__ = ("_copies", "_room", "entries", "most", "tensors")

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: list[FoundTensor] = []
        self.tensors: list[Tensor] = []
        self._room: Tensor | None = None
        self._copies: Tensor | Sequence[Tensor] = ()

    def reserve(self) -> None:
        """Make room that every copy uses again."""
        first = self.tensors[0]
        with torch.inference_mode(mode=False):
            self._room = torch.empty((len(self.tensors), *first.shape), dtype=first.dtype, device=first.device)

    def fits(self) -> bool:
        """Return whether all tensors have the dtype, and the first one the shape, that room was made for; `copy` looks at the others."""
        first, room = self.tensors[0], self._room
        return (
            room is not None
            and room.shape[1:] == first.shape
            and all(map(operator.is_, map(_dtype, self.tensors), itertools.repeat(room.dtype)))
        )

    def copy(self) -> None:
        """Copy every tensor."""
        try:
            if self._room is None:
                self._copies = torch.stack(self.tensors).detach()  # `torch.no_grad` takes longer
            else:
                self._copies = torch.stack(self.tensors, out=self._room)
        except RuntimeError:  # by now of different shapes or devices
            self._copies = [tensor.detach().clone() for tensor in self.tensors]

    def pairs(self) -> Iterator[tuple[FoundTensor, Tensor]]:
        """Return the tensors, each with its copy."""
        return zip(self.entries, self._copies, strict=True)


class Plan:
    """Tensors with the room for their copies, and tensors that are held without a copy.

    Attributes:
        copied: Tensors with room of their own.
        rooms: The room of each.
        held: Tensors without a copy.
        large_bytes: Bytes of copies of tensors that are copied only because there is room.
    """

    def __init__(self) -> None:
        self.copied: list[FoundTensor] = []
        self.rooms: list[Tensor] = []
        self.held: list[FoundTensor] = []
        self.large_bytes = 0
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._stacks: list[_Stack] = []
        self._stack_of: dict[Any, _Stack] = {}
        self._is_kept = False

    def add(self, entry: FoundTensor, room: Tensor) -> None:
        """Have `entry` copied into `room`."""
        kind = kind_of_tensor(entry.tensor)
        self.copied.append(entry)
        self.rooms.append(room)
        self._tensors.append(entry.tensor)
        self._kinds.append(kind)
        rooms, tensors = self._groups.setdefault(kind[1:], ([], []))
        rooms.append(room)
        tensors.append(entry.tensor)

    def stack(self, entry: FoundTensor) -> bool:
        """Have `entry` copied with others of its kind, if it is small and laid out as its copy would be; return whether it is."""
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

    def keep(self, rooms: Rooms) -> None:
        """Let every copy use the same memory, and copy tensors of rare kinds together."""
        self._is_kept = True
        for stack in self._stacks:
            if len(stack.entries) < _FEW:
                for entry in stack.entries:
                    self.add(entry, rooms.take(entry.tensor))
            else:
                stack.reserve()
        self._stacks = [stack for stack in self._stacks if len(stack.entries) >= _FEW]

    def fits(self) -> bool:
        """Return whether the tensors have the shapes and dtypes that room was made for."""
        return list(map(kind_of_tensor, self._tensors)) == self._kinds and all(stack.fits() for stack in self._stacks)

    def copy(self) -> None:
        """Copy every tensor."""
        if not self._groups and not self._is_kept:
            self._copy_stacks()
        elif self._groups or self._stacks:
            with torch.no_grad():
                self._copy_stacks()
                for rooms, tensors in self._groups.values():
                    torch._foreach_copy_(rooms, tensors)  # pyright: ignore[reportPrivateImportUsage]

    def pairs(self) -> list[tuple[FoundTensor, Tensor]]:
        """Return the tensors that are copied, each with its copy."""
        small = (stack.pairs() for stack in self._stacks)
        return [*zip(self.copied, self.rooms, strict=True), *itertools.chain.from_iterable(small)]

    def _copy_stacks(self) -> None:
        for stack in self._stacks:
            stack.copy()


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` has entries of its own that can be copied: dense, on a device, of no class that stands for others."""
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
