"""Memory options beside the micro-batch size: activation checkpointing, the optimizer's kernel, the rows of a chunked loss.

`MemoryOptions` is what the user asks for. A plan may then choose among what was left open: `ActivationCheckpointing` and
`AppliedOptions` set the choices of one run and undo them when it ends. The classes below them change one module or optimizer, real
or a fake copy, and restore every flag: `CheckpointedBlocks`, `LossChunk` and `KernelChange`.
"""

from lightning_unified.options.activation_checkpointing import (
    ActivationCheckpointing,
    CheckpointedBlocks,
    recompute_policies,
)
from lightning_unified.options.applied import AppliedOptions
from lightning_unified.options.loss_chunk import LossChunk
from lightning_unified.options.memory_options import MemoryOptions
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
    "ActivationCheckpointing",
    "AppliedOptions",
    "CheckpointedBlocks",
    "Kernel",
    "KernelChange",
    "LossChunk",
    "MemoryOptions",
    "allowed_kernels",
    "kernel_of",
    "recompute_policies",
    "set_kernel",
]
