"""What a plan can pull besides the size of a micro-batch: recomputed blocks, the optimizer's kernel, the rows of a chunked loss.

Each memory option is applied to a module or its optimizers, a fake copy's as well as the trained ones', and undone to the last flag.
"""

from lightning_unified.options.loss_chunk import LossChunk
from lightning_unified.options.optimizer_kernel import (
    KERNELS,
    Kernel,
    KernelChange,
    allowed_kernels,
    kernel_of,
    set_kernel,
)
from lightning_unified.options.recomputed_blocks import RecomputedBlocks, recompute_policies
from lightning_unified.options.settings import AppliedOptions

__all__ = [
    "KERNELS",
    "AppliedOptions",
    "Kernel",
    "KernelChange",
    "LossChunk",
    "RecomputedBlocks",
    "allowed_kernels",
    "kernel_of",
    "recompute_policies",
    "set_kernel",
]
