"""Recognise each backend's out-of-memory errors."""

import errno
import re

import torch

from lightning_unified.errors import LightningUnifiedError

__all__ = ["is_out_of_memory"]

# One text a row, with its source. Each text names the library or the allocator that raises it, so a user's own sentence about memory does
# not match. Lightning 2.6.6's own `is_oom_error` knows only CUDA's first text and the CPU allocator's.
_TEXTS = (
    r"\b(?:CUDA|HIP|XPU|NPU|HPU|MLU|MUSA|PrivateUse1|MPS backend|C10) out of memory\b",  # the caching allocators; c10/util/Exception
    r"\b(?:CUDA|HIP|XPU)(?: driver)? error: out of memory\b",  # c10/cuda/CUDAException.cpp, c10/cuda/driver_api.h
    r"\bCuda failure (?:\d+ )?'out of memory'",  # NCCL's last error, torch/csrc/distributed/c10d/NCCLUtils.cpp
    r"\bTriton Error \[\w+\]:.*\bout of memory\b",  # triton's third_party/{nvidia,amd}/backend/driver.c
    r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b",  # names in cuda.h, hip_runtime_api.h
    r"\b(?:CUBLAS|CUDNN|CUFFT|CUSOLVER|CUSPARSE|CURAND)_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b",  # aten/src/ATen/cuda/Exceptions.cpp, CUFFTUtils.h
    r"\b(?:HIPBLAS|HIPFFT|HIPRAND|HIPSOLVER|HIPSPARSE)_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b",  # the same files, hipified
    r"\broc(?:blas|solver|sparse)_status_memory_error\b",  # rocblas-types.h, rocsparse-types.h
    r"\bmiopenStatusAllocFailed\b",  # miopen.h
    r"\b(?:UR_RESULT_ERROR|ZE_RESULT_ERROR|PI_ERROR|CL)_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",  # SYCL: unified-runtime's ur_api.h
    r"\b(?:UR_RESULT_ERROR|PI_ERROR|CL)_MEM_OBJECT_ALLOCATION_FAILURE\b",  # the same
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory",  # Metal's command buffers: "Insufficient Memory (00000008:kIOGPU…)"
    r"\bInvalid buffer size: [\d.]+ ?[KMGT]?i?B",  # MPSAllocator.mm: one tensor reaches Metal's maxBufferLength
    r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b",  # c10/core/impl/alloc_cpu.cpp
    r"\bnot enough memory: you tried to allocate \d",  # the same file, Windows
    r"\bstd::bad_alloc\b",
    r"\b(?:unable|failed) to \w+ .*Cannot allocate memory \(12\)",  # aten/src/ATen/MapAllocator.cpp: mmap and shared memory
    r"\[Errno 12\] Cannot allocate memory\b",  # the text of Python's OSError inside another error, such as a loader worker's
    r"\bDFTI ERROR: Not enough memory to allocate\b|\bSPARSE_STATUS_ALLOC_FAILED\b",  # oneMKL
    r"\bcould not create a memory(?: object)?(?:[.,;]|$)",  # oneDNN, if it cannot allocate its scratchpad
    r"\bRESOURCE_EXHAUSTED: .*(?:memory|alloc|hbm)",  # XLA: xla/pjrt, xla/service; gRPC uses the same word for quotas
    r"\bAttempting to (?:reserve|allocate) [\d.]+[KMG]i?B? at the bottom of memory\b",  # XLA on TPU
    r"\bPT_DEVMEM\b.*\bAllocation failed\b",  # habana_frameworks
    r"NVML_SUCCESS == r INTERNAL ASSERT",  # CUDACachingAllocator on machines without NVML, pytorch issue 185240
    r"\bNvMapMemAlloc",  # Jetson
)
_OUT_OF_MEMORY = re.compile("|".join(_TEXTS), re.IGNORECASE | re.MULTILINE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an out-of-memory error of any backend.

    A step is repeated after such an error. A `RuntimeError` counts by its text, which must be one that an allocator or
    a library is known to raise. The errors of this package do not count: they are final.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("the replay buffer is out of memory slots"))
        False
    """
    if isinstance(error, LightningUnifiedError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
