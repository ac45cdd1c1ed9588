"""Recognise each backend's out-of-memory errors, and release memory afterwards."""

import ctypes
import errno
import gc
import re
import sys
import textwrap
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_unified.errors import LightningUnifiedError
from lightning_unified.hardware.sources import Sources
from lightning_unified.units import GIB, KIB, MIB

__all__ = ["caught", "empty_cache", "insist", "is_out_of_memory", "release_cached_memory", "requested_bytes"]

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


T = TypeVar("T")


def caught(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `call` and None, or None and the reason why memory ran out.

    The error and its frames are gone on return.

    Raises:
        BaseException: Any error of `call` that is not about memory, unchanged.
    """
    try:
        return call(), None
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return None, textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" …")


_ATTEMPTS = 3  # judgement: memory of other programs or threads may be free at the next attempt


def insist(call: Callable[[], T], *, device: torch.device) -> T:
    """Return the result of `call`; clear caches and call it again if memory runs out.

    For small allocations that must not fail: recording state before a step, and restoring it afterwards.

    Args:
        call: Runs up to three times; the error of its last run is raised.
        device: The device whose caches are cleared.
    """
    for _ in range(_ATTEMPTS - 1):
        result, memory_ran_out = caught(call)
        if memory_ran_out is None:
            return result  # pyright: ignore[reportReturnType]  # None only if `call` returns None
        release_cached_memory(device)
    return call()


_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|KB|MB|GB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}  # torch's KB are KiB


def requested_bytes(reason: str) -> int | None:
    """Return the bytes that the failed allocation requested; None if the text does not say.

    Source:
        c10/cuda/CUDACachingAllocator.cpp ("Tried to allocate 2.00 GiB"), aten/src/ATen/mps/MPSAllocator.mm (the same
            words), c10/core/impl/alloc_cpu.cpp ("you tried to allocate 64 bytes").
    """
    found = _REQUESTED.search(reason)
    return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])


def release_cached_memory(device: torch.device, *, sources: Sources | None = None) -> None:
    """Release the memory that allocators keep for reuse, on `device` and on the host.

    With the `sources` of a simulated machine, the device is the simulated one.

    Call it outside any `except` block: a traceback holds the frames, and the frames hold the tensors (pytorch issues
    18853, 27600). On MPS this calls `torch.mps.empty_cache`, which also drops compiled graphs;
    `torch.accelerator.empty_cache` would not.
    """
    gc.collect()
    empty_cache(device, sources=sources)
    if sys.platform == "linux":
        _trim_heap()


def empty_cache(device: torch.device, *, sources: Sources | None = None) -> None:
    """Release the memory that the allocator of `device` keeps for reuse; a CPU's keeps none."""
    if device.type != "cpu":
        getattr(torch if sources is None else sources.torch, device.type).empty_cache()


def _trim_heap() -> None:
    """Return glibc's free pages to the system; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
