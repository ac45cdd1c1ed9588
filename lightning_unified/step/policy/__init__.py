"""The memory policy: how batches are split, and how the run reacts when memory runs out or gets short."""

from lightning_unified.step.policy.memory_policy import MemoryPolicy

__all__ = ["MemoryPolicy"]
