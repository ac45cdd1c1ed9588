"""Layer 2: predict the bytes and seconds of a training step, and search for a plan."""

from lightning_unified.cost_model.memory.static import describe_bytes, describe_shortage, metal_heap_bytes, static_bytes
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.printed import Printed
from lightning_unified.cost_model.render import to_text

__all__ = ["Plan", "describe_bytes", "describe_shortage", "metal_heap_bytes", "static_bytes"]

Printed.to_text = staticmethod(to_text)
