"""The live storages of a recording, and their events: allocations and frees."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_unified.cost_model.trace.trace import Category, Event, Give, Phase, Take, Work

__all__ = ["Lives", "Storage", "Storages", "alike"]

_OF_A_STEP = ("activations", "logits", "temporaries")  # categories of storages that a step makes

Lives = tuple[Category | None, int]


class Storage:
    """A live storage: its number in the trace, its bytes, its stream, and its category if known."""

    __slots__ = ("bytes", "category", "in_forward", "number", "stream", "wide")

    def __init__(self, number: int, count: int, stream: int = 0) -> None:
        self.number, self.bytes, self.stream = number, count, stream
        self.category: Category | None = None
        self.in_forward = self.wide = False


class _Streams:
    """Numbers the streams of the host, which stand for those of the device that is meant."""

    def __init__(self) -> None:
        self._default = torch.cpu.current_stream()
        self._known: list[torch.cpu.Stream] = [self._default]

    def number(self) -> int:
        """Return the number of the current stream; 0 for the default one."""
        current = torch.cpu.current_stream()
        if current is self._default:
            return 0
        if not any(current is one for one in self._known):
            self._known.append(current)
        return next(at for at, one in enumerate(self._known) if one is current)


class Storages:
    """Follows storages by weak references, and notes events while a recording runs.

    Args:
        widths: Sizes of dimensions that mark a tensor as logits.

    Attributes:
        live: The live storages, by the address of torch's storage object.
        events: Events since `begin`, with a `Storage` in place of each `Take`; None while nothing is recorded.
    """

    def __init__(self, widths: Iterable[int]) -> None:
        self.live: dict[int, Storage] = {}
        self.events: list[Work | Storage | Give] | None = None
        self._widths = frozenset(widths)
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._tied: dict[int, list[Storage]] = {}
        self._count = 0
        self._sum: tuple[Storage, int, int] | None = None
        self._streams = _Streams()

    @property
    def lives(self) -> list[Lives]:
        """The category and bytes of each live storage."""
        return [(storage.category, storage.bytes) for storage in self.live.values()]

    def begin(self, order: Sequence[Lives] | None) -> None:
        """Begin the events here, with an allocation of each live storage.

        Args:
            order: The storages that lived at the beginning of another trace; this trace begins with their order and categories. None
                keeps the order of allocation.

        Raises:
            ValueError: If the live storages differ from `order`.
        """
        living = list(self.live.values())
        if order is not None:
            if not alike(self.lives, order):
                raise ValueError("the live storages differ from those before")
            waiting: dict[Any, deque[Storage]] = {}
            for storage in living:
                waiting.setdefault(_kind((storage.category, storage.bytes)), deque()).append(storage)
            living = [waiting[_kind(one)].popleft() for one in order]
            for storage, (category, _) in zip(living, order, strict=True):
                storage.category = category
        self.events = [Work(op="", phase="setup"), *living]
        self._sum = None

    def stop(self, expand: Callable[[list[Any]], list[Any]] | None = None) -> tuple[Event, ...]:
        """End the recording, and return its events; each allocation has its category.

        Args:
            expand: Completes the events first.
        """
        raw, self.events = self.events or [], None
        raw = raw if expand is None else expand(raw)
        return tuple(
            [
                Take(one.number, one.bytes, one.category or "temporaries", stream=one.stream)
                if isinstance(one, Storage)
                else one
                for one in raw
            ]
        )

    def enter(self, tensor: Tensor, phase: Phase) -> Storage:
        """Return the tensor's storage; a storage not seen before is allocated here."""
        untyped = tensor.untyped_storage()
        key, count = untyped._cdata, untyped.nbytes()
        storage = self.live.get(key)
        if storage is not None:
            if storage.bytes not in (count, 0):
                self._resize(key, storage, count)
            return self.live[key]
        storage = self.take(count)
        if phase == "batch":
            storage.category = "batch"
        return self._follow(tensor, untyped, storage, in_forward=phase == "forward")

    def bind(self, tensor: Tensor, *, in_forward: bool = False) -> Storage:
        """Follow a new tensor's storage without noting its allocation, whose place is found later."""
        untyped = tensor.untyped_storage()
        return self._follow(tensor, untyped, self.reserve(untyped.nbytes()), in_forward=in_forward)

    def _follow(self, tensor: Tensor, untyped: torch.UntypedStorage, storage: Storage, *, in_forward: bool) -> Storage:
        key = untyped._cdata
        if in_forward:
            storage.in_forward = True
            storage.wide = bool(self._widths) and not self._widths.isdisjoint(tensor.shape[1:])
        self.live[key] = storage
        self._references[key] = weakref.ref(untyped, partial(self._gone, key))
        return storage

    def reserve(self, count: int) -> Storage:
        """Return a storage of `count` bytes with a number of its own, and note nothing."""
        self._count += 1
        return Storage(self._count, count, self._streams.number())

    def take(self, count: int) -> Storage:
        """Note an allocation of `count` bytes."""
        storage = self.reserve(count)
        if self.events is not None:
            self.events.append(storage)
        return storage

    def give(self, storage: Storage) -> None:
        """Note that a storage is freed."""
        if self.events is not None:
            self.events.append(Give(storage.number))

    def tie(self, count: int, outputs: tuple[Tensor, ...], phase: Phase) -> None:
        """Allocate memory that a kernel saves beside its results.

        It lives as long as the result that stands for it.
        """
        keys = [tensor.untyped_storage()._cdata for tensor in outputs]
        owner = next((key for key in keys if self.live[key].bytes == 0), keys[0])
        storage = self.take(count)
        storage.in_forward = phase == "forward"
        self._tied.setdefault(owner, []).append(storage)

    def forget_sum(self) -> None:
        """Forget the last sum of gradients.

        The next operation has begun, and the sum's first term was not freed before it.
        """
        self._sum = None

    def note_sum(self, result: Storage, term: Tensor) -> None:
        """Note a sum of gradients that the backward engine forms.

        If its first term is freed next, the engine adds in place.
        """
        key = term.untyped_storage()._cdata
        known = self.live.get(key)
        if self.events is None or known is None or known is result or known.bytes != result.bytes:
            return
        taken = next(at for at in range(len(self.events) - 1, -1, -1) if self.events[at] is result)
        self._sum = (result, key, taken)

    def resized(self, untyped: torch.UntypedStorage, category: Category) -> None:
        """Note that a storage was resized through its own method, and give it a category.

        A storage of 0 bytes lives no more; a tensor over it may fill it again.
        """
        key = untyped._cdata
        known = self.live.get(key)
        if known is not None and known.bytes == untyped.nbytes():
            return
        if known is not None:
            del self.live[key], self._references[key]
            self.give(known)
        if untyped.nbytes():
            storage = self.take(untyped.nbytes())
            storage.category = category
            self.live[key] = storage
            self._references[key] = weakref.ref(untyped, partial(self._gone, key))

    def _resize(self, key: int, storage: Storage, count: int) -> None:
        """Replace a storage that grew in place (`resize_`): an allocator gives it a new block."""
        grown = self.take(count)
        grown.category, grown.in_forward, grown.wide = storage.category, storage.in_forward, storage.wide
        self.give(storage)
        self.live[key] = grown

    def _gone(self, key: int, _reference: object) -> None:
        storage = self.live.pop(key, None)
        self._references.pop(key, None)
        if storage is None:
            return
        if self._sum is not None and self._sum[1] == key:
            self._add_in_place(storage)
            return
        self.give(storage)
        if not self._tied:
            return
        for tied in self._tied.pop(key, ()):
            if tied.category is None and storage.category is not None:
                tied.category = storage.category
            self.give(tied)

    def _add_in_place(self, term: Storage) -> None:
        """Let the sum use the storage of its first term, which has just been freed."""
        assert self._sum is not None
        assert self.events is not None
        result, _, index = self._sum
        self._sum = None
        del self.events[index]
        # the sum began last, or nearly
        key = next(key for key, storage in reversed(self.live.items()) if storage is result)
        self.live[key] = term


def alike(some: Iterable[Lives], others: Iterable[Lives]) -> bool:
    """Return whether the same storages live.

    Each category must hold the same number of storages, of the same sizes, in the same order.

    Storages that a step left over have no lasting category and no order that matters; of them, the number of each size must agree.
    """
    first, second = (_sizes_by_kind(lives) for lives in (some, others))
    return first == second


def _sizes_by_kind(lives: Iterable[Lives]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for one in lives:
        found.setdefault(_kind(one), []).append(one[1])
    return found


def _kind(one: Lives) -> Any:
    category, count = one
    return count if category is None or category in _OF_A_STEP else category
