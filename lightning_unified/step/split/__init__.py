"""Split batches into micro-batches by rows."""

from lightning_unified.step.split.containers import tensors_in
from lightning_unified.step.split.sizes import BatchShape, bounds, elements_per_row, positions, split_rows
from lightning_unified.step.split.splitting import BatchSplitter, planning_splitter, splitter_of

__all__ = [
    "BatchShape",
    "BatchSplitter",
    "bounds",
    "elements_per_row",
    "planning_splitter",
    "positions",
    "split_rows",
    "splitter_of",
    "tensors_in",
]
