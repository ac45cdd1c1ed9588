"""The blocks that live storages have in a simulated allocator."""

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_unified.hardware.allocators.pools import Block
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator

__all__ = ["StorageBlocks"]


@dataclass(slots=True)
class _Sum:
    """A sum of gradients that may still take the block of its first term.

    Attributes:
        storage: The sum's storage.
        key: The identity of that storage.
        size: Its bytes.
        term: The identity of the first term's storage.
        freed: Blocks freed since the sum.
    """

    storage: weakref.ref[Any]
    key: int
    size: int
    term: int
    freed: list[Block] = field(default_factory=list)


class StorageBlocks:
    """Gives each storage a block of an allocator until the storage dies.

    A sum of gradients (`hardware/allocators/engine_sums.py`) gets its block at the next operation, or its first term's at once if
    that term dies before. A storage may die at any moment, so nothing is allocated then: allocating may raise.
    """

    def __init__(self, allocator: SimulatedAllocator) -> None:
        self._allocator = allocator
        self._living: dict[int, tuple[weakref.ref[Any], Block, int]] = {}
        self._sum: _Sum | None = None

    def bytes_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the bytes of a storage when it was counted; None for a storage that does not count."""
        known = self._living.get(storage._cdata)
        if known is None and self._sum is not None and self._sum.key == storage._cdata:
            return self._sum.size
        return None if known is None else known[2]

    def count(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give a storage a block of `size` bytes; none for 0 bytes."""
        if size:
            self._hold(storage._cdata, storage, self._allocator.allocate(size), storage.nbytes())

    def count_sum(self, storage: torch.UntypedStorage, term: torch.UntypedStorage) -> None:
        """Count a sum of gradients; it takes the block of `term` if that dies first.

        First means before the next operation.
        """
        key = storage._cdata
        self._sum = _Sum(weakref.ref(storage), key, storage.nbytes(), term._cdata)

    def settle(self) -> None:
        """Give the last sum its own block if its first term lives on; call it before each operation."""
        pending, self._sum = self._sum, None
        if pending is None:
            return
        try:
            block, storage = self._allocator.allocate(pending.size), pending.storage()
            if storage is None:
                self._allocator.free(block)
            else:
                self._hold(pending.key, storage, block, pending.size)
        finally:
            self._free(pending.freed)

    def drop(self, storage: torch.UntypedStorage) -> None:
        """Stop counting a storage."""
        self._died(storage._cdata, None)

    def forget(self) -> None:
        """Stop counting all storages."""
        self._sum = None
        for key in list(self._living):
            self._died(key, None)

    def _hold(self, key: int, storage: Any, block: Block, size: int) -> None:
        self._living[key] = weakref.ref(storage, partial(self._died, key)), block, size

    def _died(self, key: int, _reference: Any) -> None:
        entry = self._living.pop(key, None)
        if entry is None:
            return
        pending = self._sum
        if pending is None:
            self._allocator.free(entry[1])
        elif key != pending.term:
            pending.freed.append(entry[1])
        else:
            self._sum, storage = None, pending.storage()
            if storage is None:
                self._allocator.free(entry[1])
            else:
                self._hold(pending.key, storage, entry[1], pending.size)
            self._free(pending.freed)

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._allocator.free(block)
