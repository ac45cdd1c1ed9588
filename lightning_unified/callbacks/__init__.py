"""Lightning callbacks for any strategy: memory, pressure, gradients, stops, checkpoints."""

from lightning_unified.callbacks.checkpoint.run_checkpoint import RunCheckpoint
from lightning_unified.callbacks.csv_logger import RunCSVLogger
from lightning_unified.callbacks.cuda_graphs import CudaGraphs
from lightning_unified.callbacks.gradient_health import GradientHealth
from lightning_unified.callbacks.interrupt import GracefulInterrupt
from lightning_unified.callbacks.memory_monitor import MemoryMonitor
from lightning_unified.callbacks.pressure.guard import PressureGuard
from lightning_unified.callbacks.progress import MemoryProgressBar, RichMemoryProgressBar

__all__ = [
    "CudaGraphs",
    "GracefulInterrupt",
    "GradientHealth",
    "MemoryMonitor",
    "MemoryProgressBar",
    "PressureGuard",
    "RichMemoryProgressBar",
    "RunCSVLogger",
    "RunCheckpoint",
]
