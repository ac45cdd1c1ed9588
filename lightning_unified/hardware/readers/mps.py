"""Reader of Apple's GPU; it writes the watermark pair before any query.

Every query constructs Metal's allocator, which reads the pair once.
"""

from lightning_unified.hardware.environment.mps import ensure_pair
from lightning_unified.hardware.host.memory import cpu_name, host_available, host_total
from lightning_unified.hardware.readers.cuda import with_cached
from lightning_unified.hardware.reading import Figure, Reading, figure
from lightning_unified.hardware.sources import Sources, torch_version

__all__ = ["HAS_COUNTERS_SINCE", "mps_name", "read_mps"]

HAS_COUNTERS_SINCE = (2, 13)
"""Before, `torch.accelerator.memory_*` fails on MPS (pytorch #186430).

The error is "Allocator for mps is not a DeviceAllocator".
"""


def read_mps(sources: Sources, index: int | None = None) -> Reading:
    """Read Apple's GPU: `total` is Metal's recommended working set, `host` the RAM behind it.

    `available` is the lower of Metal's remainder for this process and the machine's free memory. `get_memory_info` is never
    used: on MPS it counts this process only and reports the rest as free. The counters cost a Metal property and a lock, and
    never wait for the GPU. `index` is ignored.

    Source:
        `getDeviceStats` in the macOS wheels of torch 2.13.0 and 2.14.1: allocated and reserved bytes with their peaks, nothing
        else. Until 2.13 a reused buffer counts whole; since 2.14 it is split at the request; a rest below 1 MiB stays with it.
    """
    del index
    ensure_pair(sources)
    mps = sources.torch.mps
    total = figure("torch.mps.recommended_max_memory", mps.recommended_max_memory)
    driver = figure("torch.mps.driver_allocated_memory", mps.driver_allocated_memory)
    allocated = figure("torch.mps.current_allocated_memory", mps.current_allocated_memory)
    return Reading(
        device="mps",
        backend="mps",
        name=mps_name(sources),
        pool="unified",
        total=total,
        available=_available(sources, total=total, driver=driver, allocated=allocated),
        allocated=allocated,
        reserved=driver,
        peak=_counter(sources, "max_memory_allocated"),
        host=host_total(sources),
    )


def mps_name(sources: Sources) -> str:
    """Return the GPU's Metal name, such as "Apple M4 Pro"; else the name of the processor."""
    try:
        return str(sources.torch.backends.mps.get_name())
    except Exception:
        return cpu_name(sources)


def _available(sources: Sources, *, total: Figure, driver: Figure, allocated: Figure) -> Figure:
    bounds = [bound for bound in (host_available(sources),) if bound.bytes is not None]
    if total.bytes is not None and driver.bytes is not None:
        bounds.append(Figure(max(0, total.bytes - driver.bytes), "recommended_max_memory - driver_allocated_memory"))
    if not bounds:
        return Figure(None, f"unknown: {total.source}; {host_available(sources).source}")
    lowest = min(bounds, key=lambda bound: bound.bytes or 0)
    # The driver's bytes include MPSGraph's, which no tensor can reuse: only the pools' own reserve counts as cached.
    return with_cached(lowest, allocated=allocated, reserved=_counter(sources, "memory_reserved"))


def _counter(sources: Sources, name: str) -> Figure:
    if torch_version(sources) < HAS_COUNTERS_SINCE:
        return Figure(None, f"unknown: torch.accelerator.{name} works on MPS from torch 2.13 on")
    return figure(f"torch.accelerator.{name}", getattr(sources.torch.accelerator, name))
