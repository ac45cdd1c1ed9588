"""Record and restore generators, byte arrays and iterators."""

import array
import copy
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_unified.step.undo.kinds import Kind, kind_of

__all__ = ["iterator_copied", "set_state", "state_of"]


def state_of(value: Any) -> Any:
    """Return the state of a value of `Kind.STATE`, as `set_state` takes it."""
    return _access(type(value))[0](value)


def set_state(value: Any, state: Any) -> None:
    """Set the state of `value` to one that `state_of` returned."""
    _access(type(value))[1](value, state)


def iterator_copied(iterator: Any) -> Any:
    """Return a copy of `iterator` at its present position, and leave `iterator` where it is.

    The copy shares the sequences that it iterates over. An iterator that cannot be copied (over a generator function or a file) is
    returned as it is, and is not restored.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 ends this for itertools
        try:
            return _rebuilt(iterator)
        except (TypeError, AttributeError):
            return iterator


def _rebuilt(iterator: Any) -> Any:
    make, arguments, *state = iterator.__reduce__()
    rebuilt = make(*map(_inner, arguments))
    for one in state:
        if one is not None:
            rebuilt.__setstate__(_state(one))
    return rebuilt


def _state(state: Any) -> Any:
    """Return the state of an iterator with its lists copied: `itertools.cycle` adds to its own."""
    if isinstance(state, tuple):
        return tuple(map(_state, state))
    return list(state) if isinstance(state, list) else _inner(state)


def _inner(value: Any) -> Any:
    """Return an argument that rebuilds an iterator, with the iterators in it copied."""
    kind = kind_of(type(value))
    if kind is Kind.ITERATOR:
        return _rebuilt(value)
    if kind is Kind.TUPLE:
        return tuple(map(_inner, value))
    if hasattr(value, "__next__"):
        raise TypeError(f"a {type(value).__name__} cannot be copied")
    return value


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
