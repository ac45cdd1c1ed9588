"""Record and restore the random generators that a step may use."""

import _random
import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GeneratorWatch"]

_HEADER = object.__basicsize__  # bytes of CPython's object header: reference count and type
_MT19937 = 4 * 624 + 4  # bytes; numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos


class GeneratorWatch:
    """Records the states of torch's, Python's and NumPy's global random generators.

    Torch's generators are those of the host and of `device`. Python and NumPy return their state number by number. That
    takes longer than everything else recorded before a step, and few steps draw from them. So a state is fetched again
    only if the memory that holds it has changed since the last fetch: equal bytes are an equal state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python, self._numpy = _CachedState(), _CachedState()

    def note(self) -> dict[str, Any]:
        """Return the present state of every generator."""
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": self._python.state(random.getstate, _memory_of_python),
        }
        if "numpy" in sys.modules:
            states["numpy"] = self._numpy.state(sys.modules["numpy"].random.get_state, _memory_of_numpy)
        if self._device.type == "mps":
            states["device"] = torch.mps.get_rng_state()
        elif self._device.type != "cpu":
            states["device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Restore the recorded state of every generator."""
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])
        if self._device.type == "mps":
            torch.mps.set_rng_state(states["device"])
        elif self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states["device"], self._device)


class _CachedState:
    """The last known state of a generator, cached with the memory that holds it."""

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
