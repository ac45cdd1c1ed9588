"""Record and restore generators and byte arrays; count the draws from other iterators."""

import array
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

__all__ = ["Drawn", "set_state", "state_of"]


class Drawn(Iterator[Any]):
    """Stands in for an iterator that cannot be copied, and counts the values drawn from it.

    Attributes:
        source: The iterator.
        draws: The number of draws so far; any other use of `source` counts too.
    """

    __slots__ = ("draws", "source")

    def __init__(self, source: Any) -> None:
        self.source, self.draws = source, 0

    def __next__(self) -> Any:
        self.draws += 1
        return next(self.source)

    def __getattr__(self, name: str) -> Any:  # `send` of a Python generator
        self.draws += 1
        return getattr(self.source, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"cannot pickle or copy a {type(self.source).__name__}")


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


_ACCESS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.Generator, lambda value: value.bit_generator.state, _set_generator),
    (np.random.RandomState, lambda value: value.get_state(legacy=False), np.random.RandomState.set_state),
    (np.random.BitGenerator, lambda value: value.state, _set_bit_generator),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    ((bytearray, array.array), copy.copy, _set_entries),
)


@functools.lru_cache(maxsize=256)
def _access(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next((read, write) for base, read, write in _ACCESS if issubclass(kind, base))
