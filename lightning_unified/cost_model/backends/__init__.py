"""Make a dry run on fake CPU tensors behave as another backend would.

The dry run executes on fake CPU tensors, whose memory differs from the target's in four ways:

- kernels: attention, dropout, recurrent layers and normalisation save other tensors for backward (`target.py` and the files
  it imports);
- autocast casts other operations (`autocast.py`);
- kernels allocate temporaries inside (`kernel_memory/`);
- matrix libraries keep workspaces, and sums take buffers (`workspaces.py`, `reductions.py`).
"""

from lightning_unified.cost_model.backends.kernel_memory.hidden import Hidden, hidden_bytes
from lightning_unified.cost_model.backends.target import mimic
from lightning_unified.cost_model.backends.workspaces import with_workspaces

__all__ = ["Hidden", "hidden_bytes", "mimic", "with_workspaces"]
