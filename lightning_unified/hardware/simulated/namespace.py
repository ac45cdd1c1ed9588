"""Stand-in for the torch module on a simulated machine, backed by the allocator's counters."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lightning_unified.hardware.readers.mps import HAS_COUNTERS_SINCE
from lightning_unified.hardware.simulated.allocator import SimulatedAllocator
from lightning_unified.hardware.sources import major_and_minor

__all__ = ["torch_of"]


def torch_of(allocator: SimulatedAllocator, *, version: str, free: Callable[[], int]) -> SimpleNamespace:
    """Return a namespace that answers the readers' calls as torch would on the machine.

    The CPU's figures are the installed torch's.

    Args:
        allocator: The simulated device.
        version: torch's version on the machine.
        free: Returns the free bytes of `mem_get_info`.
    """
    import torch
    from torch.utils import _foreach_utils

    profile = allocator.profile
    metal, rocm = profile.backend == "mps", profile.backend == "rocm"
    absent = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda="13.0" if profile.backend == "cuda" else None, hip="7.2" if rocm else None),
        cuda=absent if metal else _cuda(allocator, free),
        mps=_mps(allocator) if metal else absent,
        xpu=absent,
        accelerator=_accelerator(allocator, counts=not metal or major_and_minor(version) >= HAS_COUNTERS_SINCE),
        backends=SimpleNamespace(
            mps=SimpleNamespace(
                is_available=lambda: metal, is_built=lambda: metal, get_name=lambda: profile.chip if metal else ""
            ),
            cuda=SimpleNamespace(is_flash_attention_available=lambda: profile.flash),
        ),
        utils=SimpleNamespace(_foreach_utils=_foreach_utils),
        bfloat16=torch.bfloat16,
        ones=lambda *shape, dtype=None, device=None: torch.ones(*shape, dtype=dtype),  # noqa: ARG005 - a CPU tensor stands for any
        get_num_threads=torch.get_num_threads,
        _C=SimpleNamespace(
            _accelerator_isAllocatorInitialized=lambda: allocator.constructed,
            _mps_maxBufferLength=lambda: profile.max_buffer or 0,
        ),
    )


def _mps(allocator: SimulatedAllocator) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: True,
        recommended_max_memory=_constructing(allocator, lambda: allocator.profile.total),
        driver_allocated_memory=_constructing(allocator, lambda: allocator.driver),
        current_allocated_memory=_constructing(allocator, lambda: allocator.allocated),
        set_per_process_memory_fraction=allocator.cap,
        empty_cache=allocator.empty_cache,
        synchronize=lambda: None,
    )


def _cuda(allocator: SimulatedAllocator, free: Callable[[], int]) -> SimpleNamespace:
    profile = allocator.profile
    properties = SimpleNamespace(
        name=profile.chip,
        total_memory=profile.total,
        is_integrated=int(profile.unified),
        gcnArchName=profile.arch,
        major=profile.capability[0] if profile.capability else 0,
        minor=profile.capability[1] if profile.capability else 0,
    )

    def cap(fraction: float, device: Any = None) -> None:
        del device
        allocator.cap(fraction)

    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: allocator.constructed,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=_of_device(lambda: profile.chip),
        get_device_properties=_of_device(lambda: properties),
        get_device_capability=_of_device(lambda: profile.capability or (0, 0)),
        mem_get_info=_of_device(lambda: (free(), profile.total)),
        memory_allocated=_of_device(lambda: allocator.allocated),
        memory_reserved=_of_device(lambda: allocator.reserved),
        max_memory_allocated=_of_device(lambda: allocator.peak),
        max_memory_reserved=_of_device(lambda: allocator.peak_reserved),
        reset_peak_memory_stats=_of_device(allocator.reset_peak),
        set_per_process_memory_fraction=cap,
        empty_cache=allocator.empty_cache,
        synchronize=_of_device(lambda: None),
    )


def _accelerator(allocator: SimulatedAllocator, *, counts: bool) -> SimpleNamespace:
    profile = allocator.profile

    def counter(ask: Callable[[], Any]) -> Callable[..., Any]:
        def answer(device: Any = None) -> Any:
            del device
            if not counts:
                raise RuntimeError("INTERNAL ASSERT FAILED: Allocator for mps is not a DeviceAllocator.")
            return ask()

        return answer

    return SimpleNamespace(
        is_available=lambda: True,
        memory_allocated=counter(lambda: allocator.allocated),
        memory_reserved=counter(lambda: allocator.reserved),
        max_memory_allocated=counter(lambda: allocator.peak),
        max_memory_reserved=counter(lambda: allocator.peak_reserved),
        reset_peak_memory_stats=counter(allocator.reset_peak),
        get_memory_info=counter(lambda: (max(0, profile.total - allocator.driver), profile.total)),
        empty_cache=allocator.empty_cache,
    )


def _constructing(allocator: SimulatedAllocator, ask: Callable[[], int]) -> Callable[[], int]:
    """Return `ask` preceded by the allocator's construction, as every query to Metal does."""

    def answer() -> int:
        allocator.construct()
        return ask()

    return answer


def _of_device(ask: Callable[[], Any]) -> Callable[..., Any]:
    """Return `ask` as a function of a device, of which there is one."""

    def answer(device: Any = None) -> Any:
        del device
        return ask()

    return answer
