"""Kinds of faults: where they strike, and what each backend says when memory runs out."""

import errno
import os
from dataclasses import dataclass

import torch

__all__ = ["SAVE_POINTS", "STEP_POINTS", "TEXTS", "Fault", "raise_out_of_memory"]

# How each backend says it; the types are those that torch 2.13 raises.
TEXTS = {
    "cpu": "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12",
    "windows": "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "cuda": "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 9.94 MiB is free.",
    "cuda runtime": "CUDA error: out of memory",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "hip": "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 12.00 GiB.",
    "mps": "MPS backend out of memory (MPS allocated: 9.00 GB, other allocations: 1.00 GB, max allowed: 10.67 GB). "
    "Tried to allocate 1.00 GB on private pool.",
    "mps buffer": "Invalid buffer size: 5.00 GB",
    "xpu": "XPU out of memory. Tried to allocate 2.00 GiB.",
    "jetson": "NvMapMemAllocInternalTagged: 1075072515 error 12",
    "nvml": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug',
    "c++": "std::bad_alloc",
    "onednn": "could not create a memory object",
    "errno": "[Errno 12] Cannot allocate memory",
    "python": "",
}
_TORCH_OWN = ("cuda", "hip", "xpu")

# Where in the training of one batch: the first line inside autograd and layers, the second in hooks, the third around the
# optimizer, the last at the n-th operation of the batch that makes a tensor, whatever that is.
STEP_POINTS = (
    *("forward", "backward", "prepare", "loss_weight"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("before_weights", "between_groups"),
    "operation",
)
# While the file is written (`nth` is the byte), while its content is gathered, and right before it gets, shares or loses a name.
SAVE_POINTS = ("save", "save: gather", "save: publish", "save: share", "save: remove")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        what: "memory" (an out-of-memory error), "gpu" (a command buffer of a simulated Mac that is aborted), "signal", "disk" (no
            space), "file limit" (RLIMIT_FSIZE), or, as under pressure and after it, "shrink" and "grow".
        point: Where: one of `STEP_POINTS`, "validation", one of `SAVE_POINTS`, "validation operation", "save operation"
            for pressure "end of batch", or "any file" for a disk that is full from one batch to another.
        batch: In which training batch, from 0 over all epochs; for a validation or a save, in the first one from that batch on.
        nth: At which passage of that point in the batch, from 1.
        times: How often, or for how many batches, in a row.
        text: Key of `TEXTS`.
        number: The signal's.
    """

    what: str
    point: str
    batch: int
    nth: int = 1
    times: int = 1
    text: str = "cpu"
    number: int = 0

    def strike(self) -> None:
        """Do it."""
        if self.what == "signal":
            os.kill(os.getpid(), self.number)
        elif self.what == "memory":
            raise_out_of_memory(self.text)
        else:
            raise OSError(errno.ENOSPC, "No space left on device")


def raise_out_of_memory(text: str) -> None:
    """Raise the error that a backend raises when memory runs out."""
    if text == "python":
        raise MemoryError
    raise (torch.OutOfMemoryError if text in _TORCH_OWN else RuntimeError)(TEXTS[text])
