"""Restore untrained tensors: small ones from copies, large ones guarded by checksums."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from lightning_unified.errors import UndoError
from lightning_unified.step.undo.cells import path_text
from lightning_unified.step.undo.plans import SMALL, CopyBuffers, Plan, bytes_of, is_plain, kind_of_tensor
from lightning_unified.step.undo.walk import FoundTensor
from lightning_unified.units import MIB, format_bytes

__all__ = ["Checksum", "NotedTensors", "TensorKeeper", "checksum", "differing", "version_of"]

_SAMPLES = 4096
_MOST = 1 << 27  # words read at most, 1 GiB; of a larger tensor every second, third, … word is read
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum, and the tensor's version counter when it was taken.

    Attributes:
        value: Two integers, on the tensor's device.
        version: The counter.
    """

    value: Tensor
    version: int


def checksum(tensor: Tensor) -> Tensor:
    """Return two integers that change with the entries of `tensor`.

    The call does not wait for the tensor's device.

    The first integer is the sum of all bits, eight bytes at a time. It is exact, because integers wrap around. The second weighs some
    entries by their position, because a sum stays equal when two entries swap places.
    """
    with torch.no_grad():
        words = _words(tensor.detach())
        words = words[:: -(-words.numel() // _MOST)]
        sample = words[:: max(words.numel() // _SAMPLES, 1)].to(torch.int64)
        places = torch.arange(1, sample.numel() + 1, device=sample.device)
        return torch.stack([words.sum(dtype=torch.int64), (sample * places).sum()])


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as a flat tensor of the widest integers that its size allows."""
    flat = tensor.contiguous().view(-1)
    if flat.numel() == 1:
        flat = flat.view(()).view(1)  # that of a slice may keep a stride, with which no other format can be viewed
    width = 8
    while (flat.numel() * flat.element_size()) % width or (flat.storage_offset() * flat.element_size()) % width:
        width //= 2
    return flat.view(torch.uint8).view(_WIDTHS[width]) if flat.numel() else flat.new_zeros(1, dtype=torch.int64)


def differing(pairs: Mapping[Name, tuple[Tensor, Tensor]]) -> list[Name]:
    """Return the names of pairs of checksums that differ; waits for each device once."""
    by_device: dict[torch.device, list[Name]] = {}
    for name, (_, now) in pairs.items():
        by_device.setdefault(now.device, []).append(name)
    found: list[Name] = []
    for names in by_device.values():
        before, now = (torch.stack([pairs[name][side] for name in names]) for side in (0, 1))
        differ = (before.to(now.device) != now).any(1).tolist()
        found += [name for name, one in zip(names, differ, strict=True) if one]
    return found


# judgement: most bytes of large tensors that are copied; buffers before the first step are not counted
_COPY_LIMIT = 256 * MIB


class TensorKeeper:
    """Records tensors that a walk found, and learns which of the large ones a step changes.

    Small tensors are copied before every step, in one call. Also copied are running statistics, states of metrics, and large tensors that
    an earlier step changed. Before the first step, all buffers are copied, and other large tensors within the limit.

    Other large tensors are compared by version counter and by checksum, because `tensor.data.mul_()` and fused kernels move no counter.
    A checksum reads the whole tensor, so checksums are taken only after the successful steps 1, 2, 4, 8 and so on. Once a tensor has
    changed without moving its counter, each note takes its checksum, unless it is copied.

    A failed step may change a tensor without a copy. Such a tensor cannot be restored: the run stops with an error that names it.

    One record is valid at a time: the next `note` writes over its copies.
    """

    def __init__(self) -> None:
        self._buffers, self._moving_buffers = CopyBuffers(), CopyBuffers()
        self._changing: set[tuple[int, Any]] = set()
        self._unseen: set[tuple[int, Any]] = set()  # slots of tensors that change and move no version counter
        self._checksums: dict[tuple[int, Any], Checksum] = {}
        self._successes = 0
        self._fixed: Sequence[FoundTensor] | None = None
        self._plan: Plan | None = None

    def note(self, fixed: Sequence[FoundTensor], moving: Sequence[FoundTensor]) -> "NotedTensors":
        """Copy small tensors, and read the version counters of the others.

        Args:
            fixed: Tensors whose places were scanned; pass the same object while no place holds another tensor.
            moving: Tensors whose places may hold other tensors by now.
        """
        if fixed is not self._fixed or self._plan is None or not self._plan.fits():
            self._plan, self._fixed = self._planned(fixed, self._buffers, limit=_COPY_LIMIT), fixed
            self._plan.keep(self._buffers)
        plans = [self._plan]
        if moving:
            plans.append(self._planned(moving, self._moving_buffers, limit=_COPY_LIMIT - self._plan.large_bytes))
        for plan in plans:
            plan.copy()
        fresh = {
            entry.slot: Checksum(checksum(entry.tensor), version_of(entry.tensor))
            for plan in plans
            for entry in (plan.held if self._unseen else ())
            if entry.slot in self._unseen and _can_be_summed(entry.tensor)
        }
        return NotedTensors(plans, {**self._checksums, **fresh})

    def learn(self, noted: "NotedTensors") -> None:
        """Record which large tensors a successful step changed, and drop needless copies."""
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
            copied = zip(plan.copied, plan.buffers, strict=True)
            self._buffers.keep(buffer for entry, buffer in copied if self._is_needed(entry) or self._may_change(entry))
        self._moving_buffers = CopyBuffers()

    def release(self) -> None:
        """Drop all copies; the next note allocates new ones."""
        self._plan, self._buffers, self._moving_buffers = None, CopyBuffers(), CopyBuffers()

    def _refresh(self, noted: "NotedTensors") -> set[tuple[int, Any]]:
        """Take new checksums of tensors without a copy, and return slots with unnoticed changes.

        A change is unnoticed if the checksum differs and the version counter has not moved.
        """
        held = [entry for entry in noted.held if _can_be_summed(entry.tensor)]
        sums = {entry.slot: Checksum(checksum(entry.tensor), version_of(entry.tensor)) for entry in held}
        pairs = {slot: (self._checksums[slot], new) for slot, new in sums.items() if slot in self._checksums}
        unmoved = {slot: pair for slot, pair in pairs.items() if pair[0].version == pair[1].version}
        changed = set(differing({slot: (old.value, new.value) for slot, (old, new) in unmoved.items()}))
        self._checksums = sums
        self._unseen |= changed
        return changed

    def _planned(self, entries: Sequence[FoundTensor], buffers: CopyBuffers, *, limit: int) -> Plan:
        """Decide for each tensor whether it is copied, and allocate the copies."""
        buffers.begin()
        plan, in_fake_mode = Plan(), torch._C._len_torch_dispatch_stack() > 0 and detect_fake_mode() is not None
        for entry in entries:
            tensor = entry.tensor
            if in_fake_mode and not isinstance(tensor, FakeTensor):
                continue  # a dry run cannot write it; the code around the dry run restores it
            if entry.copied is not False and plan.stack(entry):
                continue
            size, is_needed = bytes_of(tensor), self._is_needed(entry)
            may_fit = self._may_change(entry) and plan.large_bytes + size <= limit
            if is_plain(tensor) and (is_needed or may_fit):
                plan.large_bytes += 0 if is_needed else size
                plan.add(entry, buffers.take(tensor))
            else:
                plan.held.append(entry)
        return plan

    def _is_needed(self, entry: FoundTensor) -> bool:
        """Return whether a tensor is copied regardless of the limit."""
        is_small = entry.copied is None and bytes_of(entry.tensor) <= SMALL
        return bool(entry.copied) or is_small or (entry.is_buffer and not self._successes)

    def _may_change(self, entry: FoundTensor) -> bool:
        """Return whether a tensor is copied within the limit.

        Before the first successful step, any tensor may change; afterwards only those that a step has changed.
        """
        return entry.copied is not False and (not self._successes or entry.slot in self._changing)


class NotedTensors:
    """Tensors as they were when a step began.

    Args:
        plans: The copied tensors, and the tensors held without a copy.
        checksums: Checksums of some of the tensors without a copy, by slot.
    """

    def __init__(self, plans: list[Plan], checksums: dict[tuple[int, Any], Checksum]) -> None:
        self.plans = plans
        self.held = [entry for plan in plans for entry in plan.held]
        self._versions = list(map(_version_at, self.held))
        self._checksums = checksums

    @property
    def copied(self) -> list[tuple[FoundTensor, Tensor]]:
        """Pairs of each copied tensor and its copy; the next `note` writes over the copies."""
        return [pair for plan in self.plans for pair in plan.pairs()]

    def moved(self) -> set[tuple[int, Any]]:
        """Return the slots of tensors without a copy that have a moved version counter."""
        now = map(_version_at, self.held)
        return {entry.slot for entry, old, new in zip(self.held, self._versions, now, strict=True) if old != new}

    def copies_that_differ(self) -> set[tuple[int, Any]]:
        """Return the slots of large tensors that differ from their copies."""
        copied = (pair for plan in self.plans for pair in zip(plan.copied, plan.buffers, strict=True))
        large = [pair for pair in copied if bytes_of(pair[1]) > SMALL]
        return {entry.slot for entry, copy in large if not _is_equal(entry.tensor, copy)}

    def restore(self) -> None:
        """Write every copy back.

        Raises:
            UndoError: If a tensor without a copy has changed.
        """
        for entry, copy in self.copied:
            if not _is_equal(entry.tensor, copy):
                _write(entry.tensor, copy)
        changed = self._changed()
        if changed:
            raise UndoError(_refusal(changed))

    def _changed(self) -> list[FoundTensor]:
        """Return the tensors without a copy that have changed."""
        sums = {
            entry.slot: (self._checksums[entry.slot].value, checksum(entry.tensor))
            for entry, version in zip(self.held, self._versions, strict=True)
            if entry.slot in self._checksums and self._checksums[entry.slot].version == version
        }
        differ, moved = set(differing(sums)), self.moved()
        return [
            entry for entry in self.held if entry.slot in differ or (entry.slot in moved and entry.slot not in sums)
        ]


def _write(tensor: Tensor, copy: Tensor) -> None:
    with (
        torch.inference_mode(tensor.is_inference()),
        torch.no_grad(),
    ):  # in this order: `inference_mode(False)` turns gradients on
        if kind_of_tensor(tensor) == kind_of_tensor(copy):
            tensor.copy_(copy)
        else:  # its data was exchanged: `tensor.data = other`
            tensor.data = copy.clone()


def _refusal(changed: list[FoundTensor]) -> str:
    names = ", ".join(f"{path_text(entry.path)} ({format_bytes(bytes_of(entry.tensor))})" for entry in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        f"a step that is undone had written {names}{more} in place, for the first time or beyond the bytes that are copied before a step "
        f"({format_bytes(_COPY_LIMIT)}), so it cannot be repeated exactly. Resume from the last checkpoint, and write such tensors in "
        "on_train_batch_end, which runs once a batch after the step, or assign a new tensor instead of writing in place."
    )


def version_of(tensor: Tensor) -> int:
    """Return the version counter of `tensor`; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def _version_at(entry: FoundTensor) -> int:
    return version_of(entry.tensor)


def _can_be_summed(tensor: Tensor) -> bool:
    return is_plain(tensor) and not (isinstance(tensor, FakeTensor) or tensor.is_conj() or tensor.is_neg())


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    return kind_of_tensor(tensor) == kind_of_tensor(copy) and torch.equal(tensor, copy)
