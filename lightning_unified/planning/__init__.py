"""Floor 2: what a run will need, and the plan that follows from it."""

from lightning_unified.planning.plan import Plan
from lightning_unified.planning.static import describe_bytes, describe_shortage, metal_heap_bytes, static_bytes

__all__ = ["Plan", "describe_bytes", "describe_shortage", "metal_heap_bytes", "static_bytes"]
