"""What each backend does with memory that the fake CPU tensors of a dry run do not show."""

from lightning_unified.cost_model.backends.kernel_memory.hidden import Hidden, hidden_bytes
from lightning_unified.cost_model.backends.optimizers import optimizer_kernels
from lightning_unified.cost_model.backends.target import BACKENDS, mimic
from lightning_unified.cost_model.backends.workspaces import with_workspaces

__all__ = ["BACKENDS", "Hidden", "hidden_bytes", "mimic", "optimizer_kernels", "with_workspaces"]
