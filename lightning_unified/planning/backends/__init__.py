"""What each backend does with memory that the fake CPU tensors of a rehearsal do not show."""

from lightning_unified.planning.backends.hidden import Hidden, hidden_bytes
from lightning_unified.planning.backends.optimizers import optimizer_kernels
from lightning_unified.planning.backends.target import BACKENDS, mimic
from lightning_unified.planning.backends.workspaces import with_workspaces

__all__ = ["BACKENDS", "Hidden", "hidden_bytes", "mimic", "optimizer_kernels", "with_workspaces"]
