"""Time and memory traffic of each training batch, to distinguish thrashing from a slow step."""

import math
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from lightning import Trainer

from lightning_unified.hardware import Pressure, Reading, Thrash, ThrashDetector, idle_bytes, read
from lightning_unified.nn.cuda_graphs import may_be_recorded
from lightning_unified.step.split import tensors_in

__all__ = ["ThrashWatch"]

_EVERY_S = 1.0  # between two readings of the device's pool
_LEAVES = 64  # tensors of a batch whose sizes are summed


class ThrashWatch:
    """Feeds the detector with batch times, paging, and idle memory of the driver.

    Args:
        clock: Returns seconds of a monotonic clock.
        read: Reads the pool of a device.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[torch.device], Reading] = read,
    ) -> None:
        self._clock, self._read = clock, read
        self._detector = ThrashDetector(clock=clock)
        self._reading: Reading | None = None
        self._read_at = -math.inf

    def began(self) -> None:
        """Note the start of a training batch."""
        self._detector.begin()

    def ended(self, trainer: Trainer, batch: Any, pressure: Pressure) -> Thrash | None:
        """Note the end of a training batch.

        Return the thrashing that its time and the newest sample show, or None.
        """
        strategy, module = trainer.strategy, trainer.lightning_module
        reading, budget = self._pool(strategy.root_device), getattr(strategy, "budget", None)
        flows = [
            flow for flow in (pressure.swap_out_bytes_per_s, pressure.decompressed_bytes_per_s) if flow is not None
        ]
        return self._detector.end(
            (_work(batch), getattr(strategy, "micro_batch_size", None)),
            traffic=sum(flows) if flows else None,
            gap=None if reading is None or may_be_recorded(module) else idle_bytes(reading),
            room=budget.bytes if budget is not None else None if reading is None else reading.total.bytes,
        )

    def advice(self, thrash: Thrash, device: torch.device) -> str:
        """Return the message about thrashing, with advice for this backend."""
        return thrash.advice(self._read(device).backend)

    def _pool(self, device: torch.device) -> Reading | None:
        """Return a reading at most a second old; None on a CPU, which caches no memory."""
        if device.type != "cpu" and self._clock() - self._read_at >= _EVERY_S:
            self._reading, self._read_at = self._read(device), self._clock()
        return self._reading


def _work(batch: Any) -> int:
    """Return the size of a batch in steps of about a fifth: batches of similar size take similar time."""
    elements = sum(map(torch.Tensor.numel, islice(tensors_in(batch), _LEAVES)))
    return round(4 * math.log2(elements)) if elements else 0
