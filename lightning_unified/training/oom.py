"""Out of memory: how each backend says it, and what gives memory back afterwards."""

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

__all__ = ["caught", "insist", "is_out_of_memory", "release_cached_memory", "requested_bytes"]

# One row a text, with where it comes from. Lightning 2.6.6's own `is_oom_error` knows only CUDA's first and the CPU allocator's.
_TEXTS = (
    r"out of memory",  # CUDA, HIP and XPU allocators, "MPS backend out of memory", "CUDA error: out of memory"
    r"Invalid buffer size",  # MPS: one tensor reaches Metal's maxBufferLength
    r"can't allocate memory",  # c10/core/impl/alloc_cpu.cpp: DefaultCPUAllocator
    r"not enough memory: you tried to allocate",  # the same file on Windows
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDNN_STATUS_ALLOC_FAILED",
    r"NVML_SUCCESS == r INTERNAL ASSERT",  # CUDACachingAllocator on machines without NVML, pytorch issue 185240
    r"NvMapMemAlloc",  # Jetson
    r"std::bad_alloc",
    r"could not create a memory object|could not create a memory$",  # oneDNN on CPU, when its scratchpad cannot be had
    r"Cannot allocate memory",  # errno ENOMEM in words
)
_OUT_OF_MEMORY = re.compile("|".join(_TEXTS), re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, on any backend.

    Only an error that names memory counts: everything else must reach the user untouched.
    """
    if isinstance(error, LightningUnifiedError):
        return False  # our own, which may tell of memory that ran out, are final
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


T = TypeVar("T")


def caught(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what `call` returns and None; or None and in words why memory ran out, with the error and its frames gone.

    Raises:
        BaseException: Whatever `call` raises that is not about memory, untouched.
    """
    try:
        return call(), None
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return None, textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" …")


_ATTEMPTS = 3  # judgement: what other programs or a neighbouring thread held may be free at the next one


def insist(call: Callable[[], T], *, device: torch.device) -> T:
    """Return what `call` gives, after clearing caches and calling it again where memory runs out in it.

    For what must not fail because it is small: notes before a step and their return after it.

    Args:
        call: What may be called several times; the last error comes through.
        device: Whose caches are cleared.
    """
    for _ in range(_ATTEMPTS - 1):
        result, memory_ran_out = caught(call)
        if memory_ran_out is None:
            return result  # pyright: ignore[reportReturnType]  # None only if `call` gives it
        release_cached_memory(device)
    return call()


_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|KB|MB|GB)")
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}  # torch's KB are KiB


def requested_bytes(reason: str) -> int | None:
    """Return the bytes that the allocation which failed asked for; None where the text does not say.

    Source:
        c10/cuda/CUDACachingAllocator.cpp ("Tried to allocate 2.00 GiB"), aten/src/ATen/mps/MPSAllocator.mm (the same words), c10/core/impl/
        alloc_cpu.cpp ("you tried to allocate 64 bytes").
    """
    found = _REQUESTED.search(reason)
    return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])


def release_cached_memory(device: torch.device, *, sources: Sources | None = None) -> None:
    """Give back what allocators keep for reuse on `device`, of a simulated machine where `sources` are one's, and on the host.

    Call it outside any `except` block: a traceback holds the frames, and the frames hold the tensors (pytorch issues 18853, 27600).
    On MPS this is `torch.mps.empty_cache`, which also drops compiled graphs; `torch.accelerator.empty_cache` would not.
    """
    gc.collect()
    if device.type != "cpu":
        getattr(torch if sources is None else sources.torch, device.type).empty_cache()
    if sys.platform == "linux":
        _trim_heap()


def _trim_heap() -> None:
    """Hand glibc's free pages back to the system; other C libraries have no such call and lose nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
