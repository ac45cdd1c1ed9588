"""Tensors that nobody trains: copied before every step if they are small, held against version counter and checksum if not."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unified.errors import RunError
from lightning_unified.training.undo.cells import path_text
from lightning_unified.training.undo.checksums import Checksum, checksum, differing
from lightning_unified.training.undo.walk import FoundTensor
from lightning_unified.units import KIB, MIB, format_bytes

__all__ = ["NotedTensors", "TensorKeeper"]

_SMALL = 64 * KIB  # a tensor of at most so many bytes is copied before every step
_ROOM = (
    256 * MIB
)  # judgement: bytes of larger ones that are copied at most; buffers before the first step are not counted
_SPARE = 64  # rooms that may lie unused: of shapes that come and go


class TensorKeeper:
    """Notes the tensors that a walk found, and learns which of the large ones a step changes.

    Small tensors are copied before every step, in one call. So are running statistics, states of metrics, and large tensors that an
    earlier step changed; before the first step all are. Other large tensors are held against their version counters, and against
    checksums, for `tensor.data.mul_()` and fused kernels move no counter. Checksums read the whole tensor, so they are taken after
    the successful steps 1, 2, 4, 8, … only. A tensor that a failed step changed and that was not copied cannot be put back: the
    run is refused, with the tensor's name.

    One note is valid at a time: the next one writes over its copies.
    """

    def __init__(self) -> None:
        self._rooms, self._moving_rooms = _Rooms(), _Rooms()
        self._changing: set[tuple[int, Any]] = set()
        self._unseen: set[tuple[int, Any]] = set()  # that change and move no version counter
        self._checksums: dict[tuple[int, Any], Checksum] = {}
        self._successes = 0
        self._fixed: Sequence[FoundTensor] | None = None
        self._plan: _Plan | None = None

    def note(self, fixed: Sequence[FoundTensor], moving: Sequence[FoundTensor]) -> "NotedTensors":
        """Copy what is to be copied, and read the version counters of the rest.

        Args:
            fixed: The same object as long as the same tensors are in the same places.
            moving: Tensors whose places may hold others by now.
        """
        if fixed is not self._fixed or self._plan is None or not self._plan.fits():
            self._plan, self._fixed = self._planned(fixed, self._rooms, room=_ROOM), fixed
            self._plan.reserve()
        plans = [self._plan]
        if moving:
            plans.append(self._planned(moving, self._moving_rooms, room=_ROOM - self._plan.large_bytes))
        for plan in plans:
            plan.copy()
        fresh = {
            entry.slot: Checksum(checksum(entry.tensor), _version(entry.tensor))
            for plan in plans
            for entry in (plan.held if self._unseen else ())
            if entry.slot in self._unseen and _can_be_summed(entry.tensor)
        }
        return NotedTensors(plans, {**self._checksums, **fresh})

    def learn(self, noted: "NotedTensors") -> None:
        """After a step that went well: remember which of the large tensors it changed, and let go of copies that are not needed."""
        changed = noted.moved()
        if self._successes == 0:
            changed |= noted.copies_that_differ()
        self._successes += 1
        if self._successes & (self._successes - 1) == 0:
            changed |= self._refresh(noted)
        if self._successes == 1 or not changed <= self._changing:
            self._changing |= changed
            self._plan = None
            plan = noted.plans[0]
            copied = zip(plan.copied, plan.rooms, strict=True)
            self._rooms.keep(room for entry, room in copied if self._is_needed(entry) or self._may_change(entry))
        self._moving_rooms = _Rooms()

    def release(self) -> None:
        """Let go of all copies; the next note makes room anew."""
        self._plan, self._rooms, self._moving_rooms = None, _Rooms(), _Rooms()

    def _refresh(self, noted: "NotedTensors") -> set[tuple[int, Any]]:
        """Take new checksums of what is held; return the slots that changed though their version counters had not moved."""
        held = [entry for entry in noted.held if _can_be_summed(entry.tensor)]
        sums = {entry.slot: Checksum(checksum(entry.tensor), _version(entry.tensor)) for entry in held}
        pairs = {slot: (self._checksums[slot], new) for slot, new in sums.items() if slot in self._checksums}
        unmoved = {slot: pair for slot, pair in pairs.items() if pair[0].version == pair[1].version}
        changed = set(differing({slot: (old.value, new.value) for slot, (old, new) in unmoved.items()}))
        self._checksums = sums
        self._unseen |= changed
        return changed

    def _planned(self, entries: Sequence[FoundTensor], rooms: "_Rooms", *, room: int) -> "_Plan":
        """Decide for each tensor whether it is copied, and make room for the copies."""
        rooms.begin()
        plan, in_fake_mode = _Plan(), torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None
        for entry in entries:
            tensor = entry.tensor
            if in_fake_mode and not isinstance(tensor, FakeTensor):
                continue  # a dry run cannot write it; what surrounds the dry run keeps it
            size = _bytes(tensor)
            if size <= _SMALL and entry.copied is not False and _can_be_stacked(tensor):
                plan.stack(entry)
                continue
            is_needed = self._is_needed(entry)
            may_fit = self._may_change(entry) and plan.large_bytes + size <= room
            if is_plain(tensor) and (is_needed or may_fit):
                plan.large_bytes += 0 if is_needed else size
                plan.add(entry, rooms.take(tensor))
            else:
                plan.held.append(entry)
        return plan

    def _is_needed(self, entry: FoundTensor) -> bool:
        """Return whether a tensor is copied whatever it takes."""
        is_small = entry.copied is None and _bytes(entry.tensor) <= _SMALL
        return bool(entry.copied) or is_small or (entry.is_buffer and not self._successes)

    def _may_change(self, entry: FoundTensor) -> bool:
        """Return whether a tensor is copied if there is room; before the first step nothing is known of any."""
        return entry.copied is not False and (not self._successes or entry.slot in self._changing)


class _Rooms:
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
            self._rooms.setdefault(_kind(room), []).append(room)

    def take(self, tensor: Tensor) -> Tensor:
        """Return a room for `tensor`."""
        kind = _kind(tensor)
        rooms, index = self._rooms.setdefault(kind, []), self._used.get(kind, 0)
        self._used[kind] = index + 1
        if index == len(rooms):
            with torch.inference_mode(mode=False), torch.no_grad():
                rooms.append(torch.empty_like(tensor, requires_grad=False))
        return rooms[index]


class _Stack:
    """Small tensors of one shape, dtype and device, which one call copies into one tensor: a tenth of the time of a clone each."""

    __slots__ = ("_copies", "_room", "entries", "tensors")

    def __init__(self) -> None:
        self.entries: list[FoundTensor] = []
        self.tensors: list[Tensor] = []
        self._room: Tensor | None = None
        self._copies: Sequence[Tensor] = ()

    def reserve(self) -> None:
        """Make room that every copy uses again."""
        first = self.tensors[0]
        with torch.inference_mode(mode=False):
            self._room = torch.empty((len(self.tensors), *first.shape), dtype=first.dtype, device=first.device)

    def fits(self) -> bool:
        """Return whether all tensors have the dtype and the first one the shape that room was made for; `copy` looks at the others."""
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
                self._copies = torch.stack(self.tensors).detach()  # `no_grad` takes longer
            else:
                with torch.no_grad():
                    self._copies = torch.stack(self.tensors, out=self._room)
        except RuntimeError:  # by now of different shapes or devices
            self._copies = [tensor.detach().clone() for tensor in self.tensors]

    def pairs(self) -> Iterator[tuple[FoundTensor, Tensor]]:
        """Return the tensors, each with its copy."""
        return zip(self.entries, self._copies, strict=True)


class _Plan:
    """Tensors with the room for their copies, and tensors that are held without a copy."""

    def __init__(self) -> None:
        self.copied: list[FoundTensor] = []
        self.rooms: list[Tensor] = []
        self.held: list[FoundTensor] = []
        self.large_bytes = 0
        self._tensors: list[Tensor] = []
        self._kinds: list[Any] = []
        self._groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self._stacks: dict[Any, _Stack] = {}

    def add(self, entry: FoundTensor, room: Tensor) -> None:
        """Have `entry` copied into `room`."""
        kind = _kind(entry.tensor)
        self.copied.append(entry)
        self.rooms.append(room)
        self._tensors.append(entry.tensor)
        self._kinds.append(kind)
        rooms, tensors = self._groups.setdefault(kind[1:], ([], []))
        rooms.append(room)
        tensors.append(entry.tensor)

    def stack(self, entry: FoundTensor) -> None:
        """Have `entry` copied together with others of its kind."""
        kind = _kind(entry.tensor)
        stack = self._stacks.get(kind)
        if stack is None:
            stack = self._stacks[kind] = _Stack()
        stack.entries.append(entry)
        stack.tensors.append(entry.tensor)

    def reserve(self) -> None:
        """Make room for small tensors too, which the next copies use again."""
        for stack in self._stacks.values():
            stack.reserve()

    def fits(self) -> bool:
        """Return whether the tensors have the shapes and dtypes that room was made for."""
        return list(map(_kind, self._tensors)) == self._kinds and all(stack.fits() for stack in self._stacks.values())

    def copy(self) -> None:
        """Copy every tensor, in one call for each kind."""
        for stack in self._stacks.values():
            stack.copy()
        if self._groups:
            with torch.no_grad():
                for rooms, tensors in self._groups.values():
                    torch._foreach_copy_(rooms, tensors)  # pyright: ignore[reportPrivateImportUsage]

    def pairs(self) -> list[tuple[FoundTensor, Tensor]]:
        """Return the tensors, each with its copy."""
        small = (stack.pairs() for stack in self._stacks.values())
        return [*zip(self.copied, self.rooms, strict=True), *itertools.chain.from_iterable(small)]


class NotedTensors:
    """Tensors as they were when a step began.

    Args:
        plans: What was copied, and what is held.
        checksums: Of some that are held.
    """

    def __init__(self, plans: list[_Plan], checksums: dict[tuple[int, Any], Checksum]) -> None:
        self.plans = plans
        self.held = [entry for plan in plans for entry in plan.held]
        self._versions = list(map(_version_of, self.held))
        self._checksums = checksums

    @property
    def copied(self) -> list[tuple[FoundTensor, Tensor]]:
        """The tensors that were copied, each with its copy, which the next note writes over."""
        return [pair for plan in self.plans for pair in plan.pairs()]

    def moved(self) -> set[tuple[int, Any]]:
        """Return the slots of tensors without a copy whose version counters have moved."""
        now = map(_version_of, self.held)
        return {entry.slot for entry, old, new in zip(self.held, self._versions, now, strict=True) if old != new}

    def copies_that_differ(self) -> set[tuple[int, Any]]:
        """Return the slots of large tensors that are not what their copies are."""
        copied = (pair for plan in self.plans for pair in zip(plan.copied, plan.rooms, strict=True))
        large = [pair for pair in copied if _bytes(pair[1]) > _SMALL]
        return {entry.slot for entry, room in large if not _is_equal(entry.tensor, room)}

    def restore(self) -> None:
        """Write every copy back.

        Raises:
            RunError: If a tensor without a copy has changed.
        """
        for entry, room in self.copied:
            if not _is_equal(entry.tensor, room):
                _write(entry.tensor, room)
        changed = self._changed()
        if changed:
            raise RunError(_refusal(changed))

    def _changed(self) -> list[FoundTensor]:
        """Return tensors without a copy that are not what they were."""
        sums = {
            entry.slot: (self._checksums[entry.slot].value, checksum(entry.tensor))
            for entry, version in zip(self.held, self._versions, strict=True)
            if entry.slot in self._checksums and self._checksums[entry.slot].version == version
        }
        differ, moved = set(differing(sums)), self.moved()
        return [
            entry for entry in self.held if entry.slot in differ or (entry.slot in moved and entry.slot not in sums)
        ]


def _write(tensor: Tensor, room: Tensor) -> None:
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        if _kind(tensor) == _kind(room):
            tensor.copy_(room)
        else:  # its data was exchanged: `tensor.data = other`
            tensor.data = room.clone()


def _refusal(changed: list[FoundTensor]) -> str:
    names = ", ".join(f"{path_text(entry.path)} ({format_bytes(_bytes(entry.tensor))})" for entry in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        f"a step that is undone had written {names}{more} in place, for the first time or beyond what is copied before a step "
        f"({format_bytes(_ROOM)}), so it cannot be repeated exactly. Resume from the last checkpoint, and write such tensors in "
        "on_train_batch_end, which runs once a batch after the step, or assign a new tensor instead of writing in place."
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` has entries of its own that can be copied: dense, on a device, of no class that stands for others."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        and (isinstance(tensor, FakeTensor) or not is_traceable_wrapper_subclass(tensor))
    )


def _can_be_stacked(tensor: Tensor) -> bool:
    """Return whether a copy among others would be the same: of no class of its own, and laid out as its copy is."""
    return (type(tensor) is Tensor or type(tensor) is nn.Parameter) and is_plain(tensor) and tensor.is_contiguous()


_kind = operator.attrgetter("shape", "dtype", "device")
_dtype = operator.attrgetter("dtype")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _version_of(entry: FoundTensor) -> int:
    return _version(entry.tensor)


def _can_be_summed(tensor: Tensor) -> bool:
    return is_plain(tensor) and not (isinstance(tensor, FakeTensor) or tensor.is_conj() or tensor.is_neg())


def _is_equal(tensor: Tensor, room: Tensor) -> bool:
    return _kind(tensor) == _kind(room) and torch.equal(tensor, room)
