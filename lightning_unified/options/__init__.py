"""What a plan can pull besides the size of a micro-batch: recomputed blocks, the optimizer's kernel, the rows of a chunked loss.

Each memory option is applied to a module or its optimizers, a fake copy's as well as the trained ones', and undone to the last flag.
"""

from lightning_unified.options.activation_checkpointing import CheckpointedBlocks, recompute_policies
from lightning_unified.options.applied import AppliedOptions
from lightning_unified.options.loss_chunk import LossChunk
from lightning_unified.options.optimizer_kernel import (
    KERNELS,
    Kernel,
    KernelChange,
    allowed_kernels,
    kernel_of,
    set_kernel,
)

__all__ = [
    "KERNELS",
    "AppliedOptions",
    "CheckpointedBlocks",
    "Kernel",
    "KernelChange",
    "LossChunk",
    "allowed_kernels",
    "kernel_of",
    "recompute_policies",
    "set_kernel",
]
