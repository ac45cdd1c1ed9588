"""Clear the device's caches between batches when that pays off."""

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from lightning_unified.hardware import CachePolicy, Reading, ShapeWatch, idle_bytes, read
from lightning_unified.step.recovery.oom import release_cached_memory
from lightning_unified.step.split import tensors_in
from lightning_unified.units import format_bytes

__all__ = ["CacheCare", "shapes_of"]

log = logging.getLogger("lightning_unified")

_EVERY_S = 1.0  # seconds between two readings of the counters, which are cheap but not free
_LEAVES = 64  # tensors of a batch whose shapes are read


class CacheCare:
    """Reads the counters after a batch, at most once a second; clears caches if it pays off.

    Only clearing waits for the device. On a CPU there is nothing to clear, and no counter is read.

    Args:
        clock: Returns the seconds of a monotonic clock.
        read: Returns the counters of a device's pool.
        live: Returns the live bytes of a device whose backend counts no peak; cheap enough for every micro-batch.
        release: Clears the caches of a device.

    Attributes:
        pressed: Whether the system warns that memory is short; set by the code that watches the system.
        clears: How often caches were cleared.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[torch.device], Reading] = read,
        live: Callable[[torch.device], int | None] | None = None,
        release: Callable[[torch.device], None] = release_cached_memory,
    ) -> None:
        self._clock, self._read, self._release = clock, read, release
        self._live = live or _live_bytes
        self.pressed = False
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Begin a fit on `device`."""
        self._device = device
        self._policy, self._shapes = CachePolicy(clock=self._clock), ShapeWatch()
        self._shape: object = ()
        self._began: float | None = None
        self._looked_at = self._clock()
        self._counts_peak, self._seen = True, 0
        self.clears = 0

    def batch_began(self, batch: Any) -> None:
        """Record the shapes and the start time of a training batch on the device."""
        if self._device.type != "cpu":
            self._shape, self._began = shapes_of(batch), self._clock()

    def sample(self) -> None:
        """Record the live bytes before a backward pass, if the backend counts no peak.

        Memory is highest there.
        """
        if not self._counts_peak:
            self._seen = max(self._seen, self._live(self._device) or 0)

    def batch_done(self, budget: int) -> list[str]:
        """Clear caches after a step if it pays off; return new events, each once a fit.

        `budget` is the number of bytes the run may use.
        """
        if self._device.type == "cpu":
            return []
        now = self._clock()
        if self._began is not None:
            self._policy.stepped(now - self._began)
            self._began = None
        if now - self._looked_at < _EVERY_S:
            return []
        self._looked_at = now
        reading = self._read(self._device)
        self._counts_peak = reading.peak.bytes is not None
        idle = idle_bytes(reading, seen=self._seen)
        advice = self._shapes.look(self._shape, beyond=idle, budget=budget)
        said = [] if advice is None else [advice]
        if advice is not None:
            log.warning("%s", advice)
        if self._policy.due(idle=idle, budget=budget, pressed=self.pressed):
            self._release(self._device)
            self._policy.cleared(self._clock() - now)
            self.clears += 1
            if self.clears == 1:
                why = ", while memory is short" if self.pressed else ""
                said.append(f"caches cleared: {format_bytes(idle)} were held beside the tensors{why}")
                log.info("%s", said[-1])
        return said


def shapes_of(batch: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of a batch's first 64 tensors."""
    return tuple(tensor.shape for tensor in islice(tensors_in(batch), _LEAVES))


def _live_bytes(device: torch.device) -> int | None:
    return torch.mps.current_allocated_memory() if device.type == "mps" else None
