"""Record and restore the random generators that a step may use."""

import random
from typing import Any

import numpy as np
import torch

from lightning_unified.nn.second_run.generators import numpy_state, python_state

__all__ = ["GeneratorWatch"]


class GeneratorWatch:
    """Records the states of torch's, Python's and NumPy's global random generators.

    Torch's generators are those of the host and of `device`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def note(self) -> dict[str, Any]:
        """Return the present state of every generator."""
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": python_state(),
            "numpy": numpy_state(),
        }
        if self._device.type == "mps":
            states["device"] = torch.mps.get_rng_state()
        elif self._device.type != "cpu":
            states["device"] = torch.get_device_module(self._device).get_rng_state(self._device)
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Restore the recorded state of every generator.

        A state that is still the recorded object is unchanged, and setting one takes longer than reading it.
        """
        torch.set_rng_state(states["torch"])
        if python_state() is not states["python"]:
            random.setstate(states["python"])
        if numpy_state() is not states["numpy"]:
            np.random.set_state(states["numpy"])  # noqa: NPY002  # the global generator
        if self._device.type == "mps":
            torch.mps.set_rng_state(states["device"])
        elif self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states["device"], self._device)
