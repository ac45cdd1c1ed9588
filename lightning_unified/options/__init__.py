"""Memory options: activation checkpointing, compilation, optimizer kernel and loss chunk.

`MemoryOptions` holds the user's settings. A plan may choose the settings that the user left open. `ActivationCheckpointing`, `Compilation` and
`AppliedOptions` apply the choices of one run and undo them when it ends. They use `CheckpointedBlocks`, `LossChunk` and
`KernelChange`, each of which changes one module or optimizer (real or a fake copy) and restores every flag.
"""

from lightning_unified.options.activation_checkpointing import (
    ActivationCheckpointing,
    CheckpointedBlocks,
    recompute_policies,
)
from lightning_unified.options.applied import AppliedOptions
from lightning_unified.options.compilation import (
    Compilation,
    CompileCost,
    compile_pays,
    compiled_only_in_training,
)
from lightning_unified.options.loss_chunk import LossChunk
from lightning_unified.options.memory_options import MemoryOptions
from lightning_unified.options.optimizer_kernel import (
    KERNELS,
    allowed_kernels,
    kernel_of,
    set_kernel,
)

__all__ = [
    "KERNELS",
    "ActivationCheckpointing",
    "AppliedOptions",
    "CheckpointedBlocks",
    "Compilation",
    "CompileCost",
    "LossChunk",
    "MemoryOptions",
    "allowed_kernels",
    "compile_pays",
    "compiled_only_in_training",
    "kernel_of",
    "recompute_policies",
    "set_kernel",
]
