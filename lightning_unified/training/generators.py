"""The random generators that a step may draw from: noted before it, put back when it is to be repeated."""

import ctypes
import random
import sys
from typing import Any

import torch

__all__ = ["GeneratorWatch"]

_MT19937_BYTES = 4 * 624 + 4  # numpy/random/src/mt19937/mt19937.h: uint32_t key[624]; int pos;


class GeneratorWatch:
    """The states of torch's generators (host and `device`), Python's and numpy's global ones.

    numpy takes as long to tell its state as all the others together, element by element, and few steps draw from it. So it is asked
    only when the memory that holds its state is not what it was when it was asked last. Same bytes are the same state:
    the generator's own fields, with a normal deviate that is waiting, and the struct of its Mersenne twister. Another kind of bit
    generator is asked every time.

    Args:
        device: The one that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy: Any = None
        self._numpy_memory: bytes | None = None

    def note(self) -> dict[str, Any]:
        """Return every state as it is now."""
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if "numpy" in sys.modules:
            states["numpy"] = self._state_of_numpy()
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

    def _state_of_numpy(self) -> Any:
        get_state = sys.modules["numpy"].random.get_state
        memory = _memory_of(get_state.__self__)
        if memory is None or memory != self._numpy_memory:
            self._numpy = get_state()
            self._numpy_memory = memory if memory == _memory_of(get_state.__self__) else None  # another thread may draw
        return self._numpy


def _memory_of(generator: Any) -> bytes | None:
    """Return the bytes that decide what numpy's `RandomState` gives next; None where they are not known."""
    twister = generator._bit_generator
    if type(twister).__name__ != "MT19937":
        return None
    header = object.__basicsize__  # counts references
    fields = ctypes.string_at(id(generator) + header, type(generator).__basicsize__ - header)
    return fields + ctypes.string_at(twister.ctypes.state_address, _MT19937_BYTES)
