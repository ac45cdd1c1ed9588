"""The training step: Lightning's automatic optimization, run in micro-batches and repeated after an out-of-memory error."""

from lightning_unified.step.loop.optimization import UnifiedOptimization

__all__ = ["UnifiedOptimization"]
