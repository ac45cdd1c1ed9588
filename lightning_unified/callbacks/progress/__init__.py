"""Progress bars with memory, micro-batch size and pressure; lines where no bar can be drawn."""

from lightning_unified.callbacks.progress.bars import MemoryProgressBar, RichMemoryProgressBar

__all__ = ["MemoryProgressBar", "RichMemoryProgressBar"]
