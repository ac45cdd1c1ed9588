"""`MemoryMonitor`: log memory counters without waiting for the device or freeing memory."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.callbacks.device_pool import pool_of, simulated_by
from lightning_unified.callbacks.loops import logged_step
from lightning_unified.errors import check_count
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.reading import Reading

__all__ = ["MemoryMonitor"]


class MemoryMonitor(Callback):
    """Log memory figures and the micro-batch size every few batches.

    Metrics: `memory/allocated`, `/reserved`, `/peak`, `/available` (bytes) and `/micro_batch_size` (rows).

    Figures that the backend does not provide are not logged. On a backend without a peak counter, the peak is the largest sample of
    `allocated`: before each backward pass and optimizer step, where memory is highest, and after each batch. Then `peak_source`
    says `sampled`, and the metric is `memory/peak_sampled`. Figures of a simulated machine are logged under
    `memory_simulated_<machine>/`.

    Args:
        every_n_batches: Training batches between two logs.

    Attributes:
        peak: The peak in bytes, None while unknown.
        peak_source: The counter of `peak`.

    Raises:
        ConfigurationError: If `every_n_batches` is less than 1.
    """

    def __init__(self, *, every_n_batches: int = 10) -> None:
        check_count("MemoryMonitor: every_n_batches", every_n_batches)
        self.every_n_batches = every_n_batches
        self.peak: int | None = None
        self.peak_source = "unknown: nothing was read yet"
        self._samples = True

    def read(self, device: torch.device) -> Reading:
        """Read the pool of `device`; tests override this method."""
        return read(device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._samples:
            self._look(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._samples:
            self._look(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        logs = (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0
        if not (logs or self._samples):
            return
        reading = self._look(trainer)
        if logs and trainer.loggers:
            metrics = self._metrics(trainer, reading)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=logged_step(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> Reading:
        device, sources = pool_of(trainer)
        reading = self.read(device) if sources is None else read(device, sources=sources)
        self._samples = reading.peak.bytes is None
        if not self._samples:
            self.peak, self.peak_source = reading.peak.bytes, reading.peak.source
        elif reading.allocated.bytes is not None:
            self.peak = max(self.peak or 0, reading.allocated.bytes)
            self.peak_source = f"sampled: greatest {reading.allocated.source} seen"
        return reading

    def _metrics(self, trainer: Trainer, reading: Reading) -> dict[str, float]:
        figures = {
            "allocated": reading.allocated.bytes,
            "reserved": reading.reserved.bytes,
            "peak_sampled" if self._samples else "peak": self.peak,
            "available": reading.available.bytes,
            "micro_batch_size": getattr(trainer.strategy, "micro_batch_size", None),
        }
        machine = simulated_by(trainer)
        group = "memory" if machine is None else f"memory_simulated_{machine.profile.name}"
        return {f"{group}/{name}": float(figure) for name, figure in figures.items() if figure is not None}
