"""The memory policy: how batches are split, and reactions if memory is short or runs out.

| module | answers |
|---|---|
| batch_rules | Which rules split a batch? |
| split_approval | May it be split, and how are micro-batches weighted? |
| sizing | How large is a micro-batch, and when does it shrink or grow? |
| notices | Which notes does the user get, once each? |
| memory_policy | How does the run react when memory runs out? |
"""

from lightning_unified.step.policy.memory_policy import MemoryPolicy

__all__ = ["MemoryPolicy"]
