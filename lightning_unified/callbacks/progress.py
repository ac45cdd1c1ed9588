"""Progress bars that show memory and the micro-batch size beside the metrics."""

import time
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from typing_extensions import override

from lightning_unified.callbacks.device_pool import pool_of, simulated_by
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.reading import Reading
from lightning_unified.units import GIB

__all__ = ["MemoryProgressBar", "RichMemoryProgressBar"]

_SECONDS_BETWEEN_READINGS = 1.0

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ProgressBar as _Bar
else:
    _Bar = object


class _MemoryColumns(_Bar):
    """Adds memory and micro-batch size to a progress bar.

    `mem 1.2/4.0 GiB` is allocated of the budget, or of the pool without a budget. `micro 4` is in rows.

    The bar updates its columns every batch; readings are cached for a second, so that short batches cost nothing.
    """

    _next_reading = 0.0
    _columns: dict[str, str] | None = None

    def read(self, device: torch.device) -> Reading:
        """Read the pool of `device`; tests override this method."""
        return read(device)

    def now(self) -> float:
        """Return seconds of a monotonic clock."""
        return time.monotonic()

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        columns: dict[str, Any] = {**super().get_metrics(trainer, pl_module)}
        now = self.now()
        if self._columns is None or now >= self._next_reading:
            device, sources = pool_of(trainer)
            reading = self.read(device) if sources is None else read(device, sources=sources)
            self._columns = _memory_columns(trainer, reading)
            self._next_reading = now + _SECONDS_BETWEEN_READINGS
        return {**columns, **self._columns}


class MemoryProgressBar(_MemoryColumns, TQDMProgressBar):
    """Lightning's default bar with `mem` and `micro`; arguments are those of `TQDMProgressBar`."""


class RichMemoryProgressBar(_MemoryColumns, RichProgressBar):
    """Lightning's Rich bar with `mem` and `micro`; arguments are those of `RichProgressBar`."""


def _memory_columns(trainer: Trainer, reading: Reading) -> dict[str, str]:
    columns = {}
    budget = getattr(getattr(trainer.strategy, "budget", None), "bytes", None)
    limit = reading.total.bytes if budget is None else budget
    if reading.allocated.bytes is not None:
        used = f"{reading.allocated.bytes / GIB:.1f}"
        columns["mem"] = f"{used} GiB" if limit is None else f"{used}/{limit / GIB:.1f} GiB"
        machine = simulated_by(trainer)
        if machine is not None:
            columns["mem"] += f" (simulated {machine.profile.name})"
    micro_batch_size = getattr(trainer.strategy, "micro_batch_size", None)
    if micro_batch_size is not None:
        columns["micro"] = str(micro_batch_size)
    return columns
