"""Call again after out-of-memory errors, and release memory."""

import ctypes
import gc
import re
import sys
import textwrap
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.hardware.sources import Sources
from lightning_unified.units import GIB, KIB, MIB

__all__ = ["caught", "empty_cache", "insist", "release_cached_memory", "requested_bytes"]

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
