"""The training step: Lightning's automatic optimization in micro-batches, with recovery.

A step that runs out of memory is undone and repeated.
"""

from lightning_unified.step.loop.optimization import UnifiedOptimization

__all__ = ["UnifiedOptimization"]
