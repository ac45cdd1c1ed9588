"""The memory policy: how batches are split, and how the run reacts when memory runs out or gets short.

| module | answers |
|---|---|
| batch_rules | By which rules is a batch split? |
| split_approval | May it be split, and how are micro-batches weighted? |
| sizing | How large is a micro-batch, and when does it shrink or grow? |
| notices | What is the user told, once? |
| memory_policy | What happens when memory runs out? |
"""

from lightning_unified.step.policy.memory_policy import MemoryPolicy

__all__ = ["MemoryPolicy"]
