"""Logits that are computed only where they are read, and their cross-entropy in chunks.

`LazyHeads` replaces the forward of a model's output heads. In training they return `LazyLogits`, a tensor without storage. Operations
between head and loss are recorded, and replayed on each chunk of rows. `recorded_logits` returns them as a linear layer and a function.
"""

from lightning_unified.nn.lazy_logits.find import obstacles, output_heads, tied_heads
from lightning_unified.nn.lazy_logits.heads import LazyHeads, rows_of
from lightning_unified.nn.lazy_logits.recorded import LinearLogits, UnknownLogitsError, recorded_logits

__all__ = [
    "LazyHeads",
    "LinearLogits",
    "UnknownLogitsError",
    "obstacles",
    "output_heads",
    "recorded_logits",
    "rows_of",
    "tied_heads",
]
