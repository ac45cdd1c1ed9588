"""Record and restore generators and byte arrays; count the draws from other iterators."""

import array
import copy
import functools
import queue
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

from lightning_unified.errors import UndoError

__all__ = ["Drawn", "no_draws", "set_state", "state_of"]


class Drawn(Iterator[Any]):
    """Stands in for an iterator that cannot be copied, and counts the values drawn from it.

    Attributes:
        source: The iterator.
        draws: The number of draws so far; `send`, `throw` and `close` of a Python generator count too.
        may_draw: Whether any stand-in may be drawn from now; `no_draws` sets it.
    """

    __slots__ = ("draws", "source")
    may_draw = True

    def __init__(self, source: Any) -> None:
        self.source, self.draws = source, 0

    def __next__(self) -> Any:
        return next(self._counted())

    def send(self, value: Any) -> Any:
        return self._counted().send(value)

    def throw(self, *error: Any) -> Any:
        return self._counted().throw(*error)

    def close(self) -> None:
        self._counted().close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as `__deepcopy__`
            raise AttributeError(name)
        return getattr(self.source, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"cannot pickle or copy a {type(self.source).__name__}")

    def _counted(self) -> Any:
        if not Drawn.may_draw:
            raise UndoError(f"it draws from a {type(self.source).__name__}, which Python cannot copy")
        self.draws += 1
        return self.source


@contextmanager
def no_draws() -> Iterator[None]:
    """Let every draw from a stand-in fail inside the block, before it changes anything."""
    may_draw, Drawn.may_draw = Drawn.may_draw, False
    try:
        yield
    finally:
        Drawn.may_draw = may_draw


def state_of(value: Any) -> Any:
    """Return the state of a value of `Kind.STATE`, as `set_state` takes it."""
    return _access(type(value))[0](value)


def set_state(value: Any, state: Any) -> None:
    """Set the state of `value` to one that `state_of` returned."""
    _access(type(value))[1](value, state)


def _set_bit_generator(generator: Any, state: Any) -> None:
    generator.state = state


def _set_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _set_entries(value: Any, entries: Any) -> None:
    value[:] = entries


def _set_length(values: "queue.SimpleQueue[Any]", length: int) -> None:
    """Take out the entries that were added after the first `length`."""
    if values.qsize() < length:
        raise UndoError("a queue.SimpleQueue that entries were taken from, which cannot be put back")
    if values.qsize() > length:
        entries = [values.get_nowait() for _ in range(values.qsize())]
        for entry in entries[:length]:
            values.put(entry)


_ACCESS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.Generator, lambda value: value.bit_generator.state, _set_generator),
    (np.random.RandomState, lambda value: value.get_state(legacy=False), np.random.RandomState.set_state),
    (np.random.BitGenerator, lambda value: value.state, _set_bit_generator),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    ((bytearray, array.array), copy.copy, _set_entries),
    (queue.SimpleQueue, queue.SimpleQueue.qsize, _set_length),
)


@functools.lru_cache(maxsize=256)
def _access(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next((read, write) for base, read, write in _ACCESS if issubclass(kind, base))
