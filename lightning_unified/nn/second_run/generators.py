"""States of random generators, read before a block's first run and set again in its second."""

import _random
import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["Noise", "RandomState", "is_generator", "numpy_state", "python_state"]

_HEADER = object.__basicsize__  # bytes of CPython's object header: reference count and type
_MT19937 = 4 * 624 + 4  # bytes; numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos


class RandomState(Protocol):
    """A random generator with a state to restore.

    Examples are `torch.mps` and a wrapper of `torch.Generator`.
    """

    def get_rng_state(self) -> Tensor: ...

    def set_rng_state(self, new_state: Tensor, /) -> None: ...


class Noise:
    """States before a block's first run of generators that torch does not restore.

    Args:
        random_state: The generator of a device; None if torch restores it.
        held: Generators that the block or its arguments hold: objects for which `is_generator` is true.
    """

    def __init__(self, random_state: RandomState | None, held: Iterable[Any] = ()) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (python_state, random.setstate),
            (numpy_state, np.random.set_state),
            *map(_access, held),
        ]
        if random_state is not None:
            self._generators.append((random_state.get_rng_state, random_state.set_rng_state))
        self._before = [get() for get, _ in self._generators]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Set the states of the first run inside the context."""
        current = [get() for get, _ in self._generators]
        self._set(self._before, unless=current)
        try:
            yield
        finally:
            self._set(current, unless=[get() for get, _ in self._generators])

    def _set(self, states: list[Any], *, unless: list[Any]) -> None:
        for (_, put), state, present in zip(self._generators, states, unless, strict=True):
            if state is not present:
                put(state)


def is_generator(kind: type) -> bool:
    """Return whether objects of the type `kind` are generators whose state can be read and set."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return functions that read and set the state of a generator."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


class _CachedState:
    """The last known state of a generator, cached with the memory that holds it.

    Python and NumPy return their states number by number, which takes about 8 and 24 µs. Few steps and blocks draw from them. So a
    state is fetched again only if the memory that holds it has changed since the last fetch: equal bytes are an equal state.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._readers: list[Callable[[], Any]] = []
        self._memory: list[Any] | None = None

    def state(self, get_state: Any, memory_of: Callable[[Any], list[Callable[[], Any]]]) -> Any:
        """Return the generator's state; call `get_state` only if its memory changed."""
        if self._memory is None or self._read() != self._memory:
            self._readers = memory_of(get_state.__self__)
            before = self._read()
            self._state = get_state()
            self._memory = before if before and before == self._read() else None  # another thread may draw meanwhile
        return self._state

    def _read(self) -> list[Any]:
        return [read() for read in self._readers]


_PYTHON, _NUMPY = _CachedState(), _CachedState()


def python_state() -> Any:
    """Return the state of Python's global generator, the same object while it is unchanged."""
    return _PYTHON.state(random.getstate, _memory_of_python)


def numpy_state() -> Any:
    """Return the state of NumPy's global generator, the same object while it is unchanged."""
    return _NUMPY.state(sys.modules["numpy"].random.get_state, _memory_of_numpy)


def _memory_of_python(generator: Any) -> list[Callable[[], Any]]:
    """Return functions that read the memory of the state of Python's generator.

    CPython keeps the Mersenne twister in the object itself, and a pending normal deviate in an attribute.
    """
    own = _view(id(generator) + _HEADER, _random.Random.__basicsize__ - _HEADER)
    return [lambda: own.raw, lambda: generator.gauss_next]


def _memory_of_numpy(generator: Any) -> list[Callable[[], Any]]:
    """Return functions that read the memory of the state of NumPy's generator.

    They read the object's fields and the struct of its Mersenne twister. The fields hold a pending normal deviate and
    the address of the bit generator, so that a replaced bit generator is noticed. For another kind of bit generator the
    list is empty.
    """
    twister = generator._bit_generator
    if type(twister).__name__ != "MT19937":
        return []
    own = _view(id(generator) + _HEADER, type(generator).__basicsize__ - _HEADER)
    struct = _view(twister.ctypes.state_address, _MT19937)
    return [lambda: own.raw, lambda: (twister, struct.raw)[1]]  # the second function keeps the twister alive


def _view(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)
