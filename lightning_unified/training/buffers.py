"""The buffers of a module as a step finds them: copied where a step changes them, and only looked at where none does."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_unified.errors import RunError

__all__ = ["BufferWatch"]


class BufferWatch:
    """Copies of the buffers that a step changes, learnt from the first step on.

    Most buffers never change (masks, position tables): a copy of each is taken before the first step only. The ones that this
    step changed, and the running statistics of normalisation layers, are copied before every step from then on. A buffer
    that first changes later, in the very step that runs out of memory, cannot be put back, and that is said.
    Values are compared once because version counters do not see everything: batch norm's kernels write running statistics
    past them (torch 2.13: `native_batch_norm` declares them as inputs).

    Args:
        module: The module whose buffers are watched; torchmetrics states have their own keeper.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._slots = _buffer_slots(module)
        self._changing: set[tuple[int, str]] | None = None
        self._is_arranged = False
        self._found: list[Tensor | None] = []  # in each slot; for as long as this stays the same, the lists below hold
        self._copied: list[Tensor] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._copies: dict[tuple[int, str], Tensor] = {}  # of `_copied`, in its order
        self._unsure: list[tuple[torch.nn.Module, str, Tensor]] = []  # not known to change
        self._versions: list[int] = []

    def note(self) -> None:
        """Remember every buffer as it is now, by copy where it is known to change or not yet known."""
        found = [owner._buffers.get(name) for owner, name in self._slots]
        if not (self._is_arranged and _are_same(found, self._found) and list(map(_kind, self._copied)) == self._kinds):
            self._arrange(found)
        self._versions = [buffer._version for _, _, buffer in self._unsure]
        if self._copied:
            with torch.no_grad():  # one call for all: a clone each would be a third of what the whole watch costs
                torch._foreach_copy_(list(self._copies.values()), self._copied)  # pyright: ignore[reportPrivateImportUsage]

    def _arrange(self, found: list[Tensor | None]) -> None:
        """Tell apart what is copied and what is not, now that slots hold `found`, and make room for copies where there is none."""
        first = self._changing is None
        copied: list[Tensor] = []
        copies: dict[tuple[int, str], Tensor] = {}
        unsure: list[tuple[torch.nn.Module, str, Tensor]] = []
        for (owner, name), buffer in zip(self._slots, found, strict=True):
            if buffer is None:
                continue
            slot = (id(owner), name)
            is_copied = first or slot in (self._changing or ()) or isinstance(owner, _NormBase)
            if is_copied:
                room = self._copies.get(slot)
                if room is None or _kind(room) != _kind(buffer):
                    room = torch.empty_like(buffer, requires_grad=False)
                copies[slot] = room
                copied.append(buffer)
            if first or not is_copied:
                unsure.append((owner, name, buffer))
        self._found, self._copied, self._copies, self._unsure = found, copied, copies, unsure
        self._kinds = list(map(_kind, copied))
        self._is_arranged = True

    def learn(self) -> None:
        """After a step that went well: remember which buffers it changed."""
        changed = {
            (id(owner), name)
            for (owner, name, buffer), version in zip(self._unsure, self._versions, strict=True)
            if owner._buffers.get(name) is not buffer or buffer._version != version
        }
        if self._changing is None:
            pairs = zip(self._copies.items(), self._copied, strict=True)
            changed |= {slot for (slot, copy), buffer in pairs if not torch.equal(copy, buffer)}
            known = {(id(owner), name) for owner, name in self._slots}
            self._slots = _buffer_slots(self._module)  # a first forward pass may have made buffers
            changed |= {(id(owner), name) for owner, name in self._slots} - known
            self._changing, self._is_arranged = changed, False
        elif changed:
            self._changing, self._is_arranged = self._changing | changed, False

    def restore(self) -> None:
        """Put every buffer back as noted.

        Raises:
            RunError: If a buffer that never changed before did so in this step.
        """
        with torch.no_grad():
            for copy, buffer in zip(self._copies.values(), self._copied, strict=True):
                buffer.copy_(copy)
        if self._changing is not None:  # what is not copied
            for (owner, name, buffer), version in zip(self._unsure, self._versions, strict=True):
                if buffer._version != version:
                    raise RunError(
                        f"memory ran out in a step that changed the buffer {name!r} of {type(owner).__name__} for the first time, so the "
                        "step cannot be repeated exactly; resume from the last checkpoint."
                    )
        for (owner, name), buffer in zip(self._slots, self._found, strict=True):
            if buffer is not None or name in owner._buffers:
                owner._buffers[name] = buffer


_kind = operator.attrgetter("shape", "dtype", "device")


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _buffer_slots(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    return [(owner, name) for owner in module.modules() if not isinstance(owner, Metric) for name in owner._buffers]
