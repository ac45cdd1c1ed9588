"""Progress bars that show memory, micro-batch size and memory pressure beside the metrics."""

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from rich.console import RenderableType
from rich.progress import Task
from rich.text import Text
from typing_extensions import override

from lightning_unified.callbacks.device_pool import pool_of
from lightning_unified.callbacks.loops import total_steps
from lightning_unified.callbacks.progress.columns import memory_columns
from lightning_unified.callbacks.progress.lines import ProgressLines
from lightning_unified.hardware.readers import read
from lightning_unified.hardware.reading import Reading
from lightning_unified.terminal import is_live, say

__all__ = ["MemoryProgressBar", "RichMemoryProgressBar"]

_SECONDS_BETWEEN_READINGS = 1.0
_SECONDS_BETWEEN_DRAWINGS = 0.1

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ProgressBar as _Bar
else:
    _Bar = object


class _MemoryColumns(_Bar):
    """Add memory, micro-batch size and pressure to a progress bar, or to plain lines.

    `mem 1.2/4.0 GiB` is allocated of the budget, or of the pool without a budget. `micro 4` is in rows. `pressure warn` is the level
    that `PressureGuard` reads.

    The bar updates its columns every batch; readings are cached for a second, so that short batches cost nothing. Without a terminal,
    and where several runs share one, the bar becomes a line every ten seconds, and later less often.
    """

    _next_reading = 0.0
    _columns: dict[str, str] | None = None
    _lines: ProgressLines | None = None

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
            self._columns = memory_columns(trainer, reading)
            self._next_reading = now + _SECONDS_BETWEEN_READINGS
        return {**columns, **self._columns}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._lines = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._lines is None and trainer.is_global_zero and not is_live(sys.stdout):
            self._lines = ProgressLines(step=trainer.global_step, now=self.now())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._lines is None:
            return
        total, now = total_steps(trainer), self.now()
        if self._lines.due(trainer.global_step, total=total, now=now):
            say(self._lines.line(total=total, now=now, metrics=self.get_metrics(trainer, pl_module)))


class MemoryProgressBar(_MemoryColumns, TQDMProgressBar):
    """Lightning's default bar with memory columns and s/it of slow steps.

    It takes the arguments of `TQDMProgressBar`.
    """

    BAR_FORMAT = TQDMProgressBar.BAR_FORMAT.replace("{rate_noinv_fmt}", "{rate_fmt}")
    _drawn = float("-inf")

    @property
    @override
    def is_disabled(self) -> bool:
        """Whether no bar is drawn."""
        return super().is_disabled or not is_live(sys.stdout)

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print a module's message above the bar."""
        if self.is_disabled:
            print(*args, sep=sep, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    @override
    def _should_update(self, current: int, total: int) -> bool:
        """Return whether the bar is drawn anew, which is ten times a second at most.

        It is drawn every `refresh_rate` batches, and a second after the last time. Drawing reads the metrics, which waits for the device.
        """
        now = self.now()
        since = now - self._drawn
        is_due = super()._should_update(current, total) and (since >= _SECONDS_BETWEEN_DRAWINGS or current == total)
        if self.is_enabled and (is_due or since >= 1.0):
            self._drawn = now
            return True
        return False


class RichMemoryProgressBar(_MemoryColumns, RichProgressBar):
    """Lightning's Rich bar with memory columns and s/it of slow steps.

    It takes the arguments of `RichProgressBar`.
    """

    @override
    def configure_columns(self, trainer: Trainer) -> list[Any]:
        columns = super().configure_columns(trainer)
        return [_Speed(column.style) if isinstance(column, ProcessingSpeedColumn) else column for column in columns]


class _Speed(ProcessingSpeedColumn):
    """The speed in it/s, or in s/it where a step takes longer than a second."""

    @override
    def render(self, task: Task) -> RenderableType:
        if not task.speed or task.speed >= 1:
            return super().render(task)
        return Text(f"{1 / task.speed:.2f}s/it", style=self.style)
