"""Reader of torch.cuda devices: NVIDIA and AMD cards, one-pool NVIDIA boards, AMD APUs."""

from typing import Any

from lightning_unified.hardware.host.memory import host_available, host_total
from lightning_unified.hardware.reading import Figure, Reading, choose_index, figure
from lightning_unified.hardware.sources import Sources, read_text

__all__ = ["is_one_pool", "read_cuda", "with_cached"]

# GB10 reports total_memory == MemTotal; a coherent machine (GH200) has its own HBM and must not match.
_ONE_POOL_TOLERANCE = 0.10


def read_cuda(sources: Sources, index: int | None = None) -> Reading:
    """Read a CUDA or ROCm device by counters and driver queries that never wait for it."""
    cuda = sources.torch.cuda
    index = choose_index(index, kind="cuda", module=cuda)
    properties = cuda.get_device_properties(index)
    rocm = bool(getattr(sources.torch.version, "hip", None))
    allocated = figure("torch.cuda.memory_allocated", lambda: cuda.memory_allocated(index))
    reserved = figure("torch.cuda.memory_reserved", lambda: cuda.memory_reserved(index))
    free = figure("torch.cuda.mem_get_info", lambda: cuda.mem_get_info(index)[0])
    total = figure("props.total_memory", lambda: properties.total_memory)
    unified = is_one_pool(properties, sources)
    if unified and rocm:
        total = _apu_total(sources, properties=total, free=free)
        free = _lower(free, host_available(sources))
    elif unified:
        # On these boards cudaMemGetInfo counts the page cache, such as that of the run's own data set, as used.
        available = host_available(sources)
        free = free if available.bytes is None else available
    return Reading(
        device=f"cuda:{index}",
        backend="rocm" if rocm else "cuda",
        name=str(properties.name),
        pool="unified" if unified else "dedicated",
        total=total,
        available=with_cached(free, allocated=allocated, reserved=reserved),
        allocated=allocated,
        reserved=reserved,
        peak=figure("torch.cuda.max_memory_allocated", lambda: cuda.max_memory_allocated(index)),
        host=host_total(sources),
    )


def is_one_pool(properties: Any, sources: Sources) -> bool:
    """Return whether the device shares the host's RAM.

    NVIDIA: integrated **and** as large as RAM within 10 %, because coherent machines (GH200) may report themselves as
    integrated and also own HBM. AMD: integrated suffices, because an APU's `total_memory` can be any share of RAM.

    Source:
        vllm PR 35356 and issue 35313 (`is_integrated`, and the doubt about GH200); unsloth PR 10486 (GB10 total).
    """
    if not getattr(properties, "is_integrated", 0):
        return False
    if getattr(sources.torch.version, "hip", None):
        return True
    ram = host_total(sources).bytes
    return ram is not None and abs(properties.total_memory - ram) < _ONE_POOL_TOLERANCE * ram


def with_cached(free: Figure, *, allocated: Figure, reserved: Figure) -> Figure:
    """Return `free` plus the cached blocks of torch that no tensor uses.

    The next tensor can reuse them.
    """
    if free.bytes is None or allocated.bytes is None or reserved.bytes is None:
        return free
    cached = max(0, reserved.bytes - allocated.bytes)
    return Figure(free.bytes + cached, f"{free.source} + own cached blocks") if cached else free


def _lower(one: Figure, other: Figure) -> Figure:
    known = [f for f in (one, other) if f.bytes is not None]
    if len(known) < 2:
        return known[0] if known else one
    lowest = min(known, key=lambda f: f.bytes or 0)
    return Figure(lowest.bytes, f"{lowest.source}, the lower of {one.source} and {other.source}")


def _apu_total(sources: Sources, *, properties: Figure, free: Figure) -> Figure:
    """Return the bytes an APU's GPU can reach, within RAM.

    That is the driver's total, or more if carve-out plus GTT are larger. HIP's own total may be half of RAM while HIP reports
    twice as much free.

    Source:
        unsloth PR 7960: 128 GB Strix Halo, total 62.47 GiB, free 120 GiB, GTT 128 GiB.
    """
    ram = host_total(sources).bytes
    cards = [path.parent for path in sorted(sources.sys.glob("class/drm/card*/device/mem_info_gtt_total"))]
    reach = Figure(free.bytes, "torch.cuda.mem_get_info")
    if len(cards) == 1:  # with two cards it is unknown which is the APU
        sizes = [(read_text(cards[0] / f"mem_info_{pool}_total") or "").strip() for pool in ("vram", "gtt")]
        if all(size.isdigit() for size in sizes):
            reach = Figure(sum(map(int, sizes)), "mem_info_vram_total + mem_info_gtt_total")
    if reach.bytes is None or ram is None or min(reach.bytes, ram) <= (properties.bytes or 0):
        return properties
    return Figure(min(reach.bytes, ram), reach.source if reach.bytes <= ram else f"MemTotal, below {reach.source}")
