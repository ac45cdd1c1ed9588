"""Work that the GPU lost: missing marks of the canary, and messages of the runtime."""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.step.faults.canary import Canary
from lightning_unified.step.faults.standard_error import StandardError

__all__ = ["FaultWatch", "Messages"]

log = logging.getLogger("lightning_unified")


class Messages(Protocol):
    """The runtime's messages about aborted command buffers."""

    def news(self) -> str | None:
        """Return the message since the last call; None if there was none."""

    def close(self) -> None:
        """Stop watching."""


class FaultWatch:
    """The canary and the runtime's messages of one fit.

    Args:
        module: The module to train.
        optimizers: The optimizers that write its weights.
        device: The device that runs the step.
        machine: The simulated machine that stands for it; its runtime's messages are then read from it. None on a real one, where
            they are read from file descriptor 2.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        *,
        device: torch.device,
        machine: SimulatedMachine | None,
    ) -> None:
        self.canary = Canary(module, optimizers, device)
        self._messages: Messages = _standard_error() if machine is None else machine.command_queue
        self._wait: Callable[[], None] = torch.mps.synchronize if machine is None else machine.command_queue.wait
        self._noted: tuple[str, bool] | None = None

    def wait(self) -> None:
        """Wait for all work on the device, so that the next work gets its own command buffer."""
        self._wait()

    def note(self) -> None:
        """Wait for the device, and record for `found` the work that it lost since the last look."""
        found, is_missing = self.look()
        if found is not None and self._noted is None:
            self._noted = found, is_missing

    def take_noted(self) -> tuple[str | None, bool]:
        """Return the fault that `note` recorded, as `look` returns it, and forget it."""
        noted, self._noted = self._noted, None
        return noted or (None, False)

    def found(self) -> tuple[str | None, bool]:
        """Return and forget the fault that `note` recorded; without one, return that of `look`."""
        noted = self.take_noted()
        return self.look() if noted[0] is None else noted

    def look(self) -> tuple[str | None, bool]:
        """Wait for the device, and return the work that it lost since the last look.

        One more mark goes ahead, into the command buffer that is still open.

        Returns:
            The loss in words, None if there is none; and whether marks are missing, not only a message there.
        """
        self.canary.mark()
        self._wait()
        missing = self.canary.missing()
        message = self._messages.news()  # after the wait: completion handlers, which print, run before it ends
        said = [] if message is None else [f"the runtime reports {message!r}"]
        if missing:
            said.append(f"marks of the canary missing: {missing}")
            self.canary.start_over()
        return ("; ".join(said) or None), bool(missing)

    def close(self) -> None:
        """Remove the hooks of the canary, and stop watching for messages."""
        self.canary.close()
        self._messages.close()


class _Silence:
    """Stands for messages that cannot be watched."""

    def news(self) -> str | None:
        """Return None."""

    def close(self) -> None:
        """Do nothing."""


def _standard_error() -> Messages:
    try:
        return StandardError()
    except OSError as error:
        log.warning("Metal's messages about lost GPU work are not watched, only the canary is: %s.", error)
        return _Silence()
