"""Record and restore the random generators that a step may use."""

import _random
import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GeneratorWatch"]

_HEADER = object.__basicsize__  # bytes that CPython puts before an object's own: its count of references, its type
_MT19937 = 4 * 624 + 4  # bytes; numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos


class GeneratorWatch:
    """The states of torch's generators (of the host and of `device`) and of Python's and numpy's global ones.

    Python and numpy tell their state number by number, which takes them longer than all else that is noted before a step, and few
    steps draw from them. So each is asked only when the memory that its state is kept in is not, byte for byte, what it was
    when it was asked last: same bytes are the same state.

    Args:
        device: The one that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python, self._numpy = _Told(), _Told()

    def note(self) -> dict[str, Any]:
        """Return every state as it is now."""
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
        """Give every generator the state that was noted."""
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        if "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])
        if self._device.type == "mps":
            torch.mps.set_rng_state(states["device"])
        elif self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states["device"], self._device)


class _Told:
    """The last known state of a generator, and its memory at that time."""

    def __init__(self) -> None:
        self._state: Any = None
        self._parts: list[Callable[[], Any]] = []
        self._memory: list[Any] | None = None

    def state(self, tell: Any, memory_of: Callable[[Any], list[Callable[[], Any]]]) -> Any:
        """Return the state that `tell`, a method of the generator, gives now; it is called only if that is not known."""
        if self._memory is None or self._read() != self._memory:
            self._parts = memory_of(tell.__self__)
            before = self._read()
            self._state = tell()
            self._memory = before if before and before == self._read() else None  # another thread may draw meanwhile
        return self._state

    def _read(self) -> list[Any]:
        return [read() for read in self._parts]


def _memory_of_python(generator: Any) -> list[Callable[[], Any]]:
    """Return what reads the twister, which CPython keeps in the object itself, and a normal deviate that waits, an attribute."""
    own = _view(id(generator) + _HEADER, _random.Random.__basicsize__ - _HEADER)
    return [lambda: own.raw, lambda: generator.gauss_next]


def _memory_of_numpy(generator: Any) -> list[Callable[[], Any]]:
    """Return what reads the fields of the object and the struct of its Mersenne twister; nothing for another kind of bit generator.

    The fields hold a normal deviate that waits, and where the bit generator is, so that another one shows there.
    """
    twister = generator._bit_generator
    if type(twister).__name__ != "MT19937":
        return []
    own = _view(id(generator) + _HEADER, type(generator).__basicsize__ - _HEADER)
    struct = _view(twister.ctypes.state_address, _MT19937)
    return [lambda: own.raw, lambda: (twister, struct.raw)[1]]  # the twister is kept alive with what reads its memory


def _view(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)
