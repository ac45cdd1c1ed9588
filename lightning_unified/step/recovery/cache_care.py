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

_EVERY_S = 1.0  # between two looks: counters are cheap, and still not free
_LEAVES = 64  # tensors of a batch that are looked at


class CacheCare:
    """Looks at the counters after a batch, at most every second; never waits for the device unless it clears.

    On a CPU there is nothing to clear, and nothing is looked at.

    Args:
        clock: Seconds, of a clock that only goes forward.
        read: Gives what the pool of a device says now.
        live: Gives the live bytes of a device whose backend counts no peak; cheap enough for every micro-batch.
        release: Clears the caches of a device.

    Attributes:
        pressed: Whether the system warns that memory is short; who watches that says so here.
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
        """A training batch is on the device, and its step begins."""
        if self._device.type != "cpu":
            self._shape, self._began = shapes_of(batch), self._clock()

    def sample(self) -> None:
        """Look at what is live where memory is highest, before a backward pass, if the backend counts no peak."""
        if not self._counts_peak:
            self._seen = max(self._seen, self._live(self._device) or 0)

    def batch_done(self, budget: int) -> list[str]:
        """Clear caches after a step if it pays off; return new events, each once a fit.

        Args:
            budget: Bytes the run may use.
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
                said.append(f"caches cleared: {format_bytes(idle)} were held beyond what tensors needed{why}")
                log.info("%s", said[-1])
        return said


def shapes_of(batch: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of a batch's tensors, of the first 64 where there are more."""
    return tuple(tensor.shape for tensor in islice(tensors_in(batch), _LEAVES))


def _live_bytes(device: torch.device) -> int | None:
    return torch.mps.current_allocated_memory() if device.type == "mps" else None
