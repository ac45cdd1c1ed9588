"""Decide when to clear an allocator's caches, and detect batch shapes that fill them."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from lightning_unified.hardware.reading import Reading
from lightning_unified.units import format_bytes

__all__ = ["CachePolicy", "ShapeWatch", "idle_bytes"]

# Judgement: unused caches of a quarter of the budget are worth a clear (field reports on MPS), under pressure a twentieth.
# Clears may cost 1 % of the run's time, under pressure 10 %: the stall they prevent then costs several times more.
_SHARE, _SHARE_PRESSED = 0.25, 0.05
_COST, _COST_PRESSED = 0.01, 0.10
_STEPS = 16  # number of steps whose median is the usual step time
_GROWN, _SHAPES = 0.10, 4


def idle_bytes(reading: Reading, *, seen: int = 0) -> int | None:
    """Return the bytes that driver or allocator hold beyond the peak of tensors.

    The result is None if not counted. The peak counts, not the live bytes at the end of a batch: activations are freed by
    then, and the next batch reuses their blocks.

    Args:
        reading: Reading of the device's pool.
        seen: Highest use sampled, for a backend without a peak counter (MPS before torch 2.13).
    """
    if reading.reserved.bytes is None or reading.allocated.bytes is None:
        return None
    return max(0, reading.reserved.bytes - max(reading.allocated.bytes, reading.peak.bytes or 0, seen))


class CachePolicy:
    """Decides when to clear caches: if much is held unused and the measured cost allows it.

    The cost of a clear is its own time and the extra time of the next step, which allocates blocks anew and, on MPS, compiles
    graphs anew. The next clear waits until that cost is 1 % of the time since the last one. The first clear does not wait.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._cleared_at: float | None = None
        self._cost = 0.0
        self._is_after = False

    def due(self, *, idle: int | None, budget: int, pressed: bool) -> bool:
        """Return whether to clear now.

        Args:
            idle: Bytes held unused; None if unknown.
            budget: Bytes the run may use.
            pressed: Whether the system warns that memory is short.
        """
        if idle is None or idle <= (_SHARE_PRESSED if pressed else _SHARE) * budget:
            return False
        if self._cleared_at is None:
            return True
        waited = self._clock() - self._cleared_at
        return not self._is_after and waited * (_COST_PRESSED if pressed else _COST) >= self._cost

    def cleared(self, seconds: float) -> None:
        """Record that a clear took `seconds`."""
        self._cleared_at, self._cost, self._is_after = self._clock(), seconds, True

    def stepped(self, seconds: float) -> None:
        """Record that a training step took `seconds`; the first after a clear adds to its cost."""
        if not self._is_after:
            self._steps.append(seconds)
            return
        self._is_after = False
        if self._steps:
            self._cost += max(0.0, seconds - median(self._steps))


class ShapeWatch:
    """Detects caches that grow while batches keep changing shape, and says so once."""

    def __init__(self) -> None:
        self._shapes: set[object] = set()
        self._least: int | None = None
        self._has_advised = False

    def look(self, shape: object, *, beyond: int | None, budget: int) -> str | None:
        """Return the advice, the first time there is a reason for it.

        Args:
            shape: Shapes of the batch's tensors.
            beyond: Bytes held beyond the peak of tensors; None if unknown.
            budget: Bytes the run may use.
        """
        if self._has_advised or beyond is None:
            return None
        if len(self._shapes) < _SHAPES:
            self._shapes.add(shape)
        self._least = beyond if self._least is None else min(self._least, beyond)
        grown = beyond - self._least
        if len(self._shapes) < _SHAPES or grown <= _GROWN * budget:
            return None
        self._has_advised = True
        return (
            f"Batches have many shapes, and caches kept for earlier shapes have grown by {format_bytes(grown)}. "
            "Pad batches to one length, or sort them into a few (buckets): blocks and compiled graphs are then reused."
        )
