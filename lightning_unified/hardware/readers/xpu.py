"""Reader of Intel GPUs. Readings only: Lightning 2.6 has no XPU accelerator to train on."""

from lightning_unified.hardware.host.memory import host_available, host_total
from lightning_unified.hardware.readers.cuda import with_cached
from lightning_unified.hardware.reading import Figure, Reading, choose_index, figure
from lightning_unified.hardware.sources import Sources

__all__ = ["read_xpu"]


def read_xpu(sources: Sources, index: int | None = None) -> Reading:
    """Read a torch.xpu device.

    Integrated GPUs cannot report free memory (`mem_get_info` raises, pytorch issues 189811 and 194487); `MemAvailable`
    replaces it. For a discrete GPU the figure stays unknown, because its memory is not the host's.
    """
    xpu = sources.torch.xpu
    index = choose_index(index, kind="xpu", module=xpu)
    properties = xpu.get_device_properties(index)
    unified = bool(getattr(properties, "is_integrated_gpu", False))
    allocated = figure("torch.xpu.memory_allocated", lambda: xpu.memory_allocated(index))
    reserved = figure("torch.xpu.memory_reserved", lambda: xpu.memory_reserved(index))
    free = figure("torch.xpu.mem_get_info", lambda: xpu.mem_get_info(index)[0])
    host = host_available(sources)
    if unified and host.bytes is not None and (free.bytes is None or host.bytes < free.bytes):
        reason = "torch.xpu.mem_get_info cannot say" if free.bytes is None else "below torch.xpu.mem_get_info"
        free = Figure(host.bytes, f"{host.source} ({reason})")
    return Reading(
        device=f"xpu:{index}",
        backend="xpu",
        name=str(properties.name),
        pool="unified" if unified else "dedicated",
        total=figure("props.total_memory", lambda: properties.total_memory),
        available=with_cached(free, allocated=allocated, reserved=reserved),
        allocated=allocated,
        reserved=reserved,
        peak=figure("torch.xpu.max_memory_allocated", lambda: xpu.max_memory_allocated(index)),
        host=host_total(sources),
    )
