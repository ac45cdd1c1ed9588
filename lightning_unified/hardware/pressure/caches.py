"""When clearing an allocator's caches is worth what it costs, and whether it is varying shapes that fill them."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from lightning_unified.hardware.reading import Reading
from lightning_unified.units import format_bytes

__all__ = ["CachePolicy", "ShapeWatch", "idle_bytes"]

# Judgement: a quarter of the budget held for nothing is worth a clear (rule of the field reports on MPS), under pressure a twentieth.
# A clear may cost a hundredth of the run's time, under pressure a tenth: what it prevents then costs several times more.
_SHARE, _SHARE_PRESSED = 0.25, 0.05
_COST, _COST_PRESSED = 0.01, 0.10
_STEPS = 16  # steps whose median is what a step takes
_GROWN, _SHAPES = 0.10, 4


def idle_bytes(reading: Reading, *, seen: int = 0) -> int | None:
    """Return what driver or allocator hold beyond the most that tensors have needed; None where nothing counts it.

    The most, and not what is live at the end of a batch: activations are freed by then, and the next batch takes their blocks
    again.

    Args:
        reading: The device's pool.
        seen: The greatest use that was sampled, for a backend that counts no peak (MPS before torch 2.13).
    """
    if reading.reserved.bytes is None or reading.allocated.bytes is None:
        return None
    return max(0, reading.reserved.bytes - max(reading.allocated.bytes, reading.peak.bytes or 0, seen))


class CachePolicy:
    """Clears neither never nor by habit: when much is held for nothing, and not more often than its measured cost allows.

    The cost of a clear is the time it took and what the step after it took longer than steps do, because blocks are asked for
    anew and, on MPS, graphs are compiled anew. The next clear waits until that cost is a hundredth of the time since the last
    one; until the first clear nothing is known, and nothing waited for.

    Args:
        clock: Seconds, of a clock that only goes forward.
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
            idle: Bytes held for nothing; None where unknown.
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
        """Caches were cleared, which took `seconds`."""
        self._cleared_at, self._cost, self._is_after = self._clock(), seconds, True

    def stepped(self, seconds: float) -> None:
        """A training step took `seconds`; the first one after a clear shows what else it cost."""
        if not self._is_after:
            self._steps.append(seconds)
            return
        self._is_after = False
        if self._steps:
            self._cost += max(0.0, seconds - median(self._steps))


class ShapeWatch:
    """Notices that what is held beyond tensors grows while batches come in ever other shapes; says so once."""

    def __init__(self) -> None:
        self._shapes: set[object] = set()
        self._least: int | None = None
        self._told = False

    def look(self, shape: object, *, beyond: int | None, budget: int) -> str | None:
        """Return the advice, the first time that there is reason for it.

        Args:
            shape: The shapes of the batch's tensors.
            beyond: Bytes held beyond what tensors have needed; None where unknown.
            budget: Bytes the run may use.
        """
        if self._told or beyond is None:
            return None
        if len(self._shapes) < _SHAPES:
            self._shapes.add(shape)
        self._least = beyond if self._least is None else min(self._least, beyond)
        grown = beyond - self._least
        if len(self._shapes) < _SHAPES or grown <= _GROWN * budget:
            return None
        self._told = True
        return (
            f"Batches come in many shapes, and what is kept for shapes of before has grown by {format_bytes(grown)}. "
            "Pad batches to one length, or sort them into a few (buckets): blocks and compiled graphs are then used again."
        )
