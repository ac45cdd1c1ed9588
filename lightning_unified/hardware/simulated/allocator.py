"""A GPU's allocator without the GPU: its counters, its limits and its out-of-memory errors."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_unified.errors import HostFrozenError
from lightning_unified.hardware.allocators.metal import MetalLimits, MetalPools, metal_pools
from lightning_unified.hardware.allocators.pools import Block, CudaSegments, Pools
from lightning_unified.hardware.environment.mps import HIGH, LOW
from lightning_unified.hardware.simulated.profiles import Profile
from lightning_unified.units import GIB, KIB, MIB

__all__ = ["SimulatedAllocator"]

_MOST_RATIO = 2.0
_CUDA_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set
_MANUAL = (
    "See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


class SimulatedAllocator:
    """Counts the memory tensors take of a simulated device, and raises as its backend does.

    Limits are read from the environment when the allocator is first used, as torch does. A card's own limit is the driver's
    remaining memory. A freed block stays reserved until a new one needs its place, until the low watermark is passed (Metal),
    or until `empty_cache`.

    Any thread may call it. Freed blocks come back through a queue, because a tensor can die at any moment.

    Args:
        profile: The machine.
        environ: Environment with Metal's watermark ratios and CUDA's share of memory, if set.
        room: Returns the bytes the driver can still give; used if the pool is bounded.
        torch_version: (major, minor) of torch on the machine, which decides Metal's allocator.
        bounded: Whether memory runs out; otherwise the counters grow without a limit.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        environ: Mapping[str, str],
        room: Callable[[], int],
        torch_version: tuple[int, int],
        bounded: bool = True,
    ) -> None:
        self.profile = profile
        self._environ = environ
        self._room = room
        self._bounded = bounded
        self._metal: MetalPools | None = None
        if profile.backend == "mps":
            self._metal = metal_pools(torch_version, max_buffer=profile.max_buffer)
        self._pools: Pools = self._metal or CudaSegments()
        self._lock = threading.RLock()
        self._returned: deque[Block] = deque()
        self._allocated = 0
        self._peak = 0
        self._peak_reserved = 0
        self._high: int | None = None
        self._low: int | None = None
        self.constructed = False

    def construct(self) -> None:
        """Construct the allocator: read the environment; later changes of it have no effect.

        Raises:
            RuntimeError: If Metal's ratios are a pair that torch refuses.
        """
        if not self.constructed:
            self.constructed = True
            self._high, self._low = _limits(self.profile, self._environ)

    def cap(self, fraction: float) -> None:
        """Limit the pools to a fraction of the total, as `set_per_process_memory_fraction` does.

        On Metal 0 means no limit.
        """
        most = _MOST_RATIO if self.profile.backend == "mps" else 1.0
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= most:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~{most:g}")
        self.construct()
        unlimited = self.profile.backend == "mps" and fraction == 0
        self._high = None if unlimited else int(fraction * self.profile.total)

    @property
    def limit(self) -> int | None:
        """The cap in bytes, None without one."""
        self.construct()
        return self._high

    @property
    def allocated(self) -> int:
        """Bytes of live tensors, rounded as the backend rounds them."""
        with self._lock:
            self._take_back()
            return self._allocated

    @property
    def reserved(self) -> int:
        """Bytes the pools hold on the device, live or not."""
        with self._lock:
            self._take_back()
            return self._pools.reserved

    @property
    def driver(self) -> int:
        """Bytes the driver holds for the process: the pools and its context."""
        return self.reserved + (self.profile.context if self.constructed else 0)

    @property
    def peak(self) -> int:
        """The highest `allocated` since the counter began."""
        return self._peak

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the counter began."""
        return self._peak_reserved

    def reset_peak(self) -> None:
        """Reset both peaks to the present use."""
        with self._lock:
            self._take_back()
            self._peak, self._peak_reserved = self._allocated, self._pools.reserved

    def empty_cache(self) -> None:
        """Return memory without tensors to the driver."""
        with self._lock:
            self._take_back()
            self._pools.release()

    def allocate(self, size: int) -> Block:
        """Return the block of a new tensor of `size` bytes.

        Raises:
            RuntimeError: On Metal, if it is out of memory or one buffer is too long.
            torch.OutOfMemoryError: On CUDA and HIP.
            HostFrozenError: If the machine would hang instead.
        """
        with self._lock:
            self.construct()
            self._take_back()
            longest = self.profile.max_buffer
            if self._bounded and longest is not None and size >= longest:
                raise RuntimeError(f"Invalid buffer size: {_words(size)}")
            rounded = self._pools.rounded(size)
            block = self._found(rounded)
            if block is None:
                raise self._out_of_memory(rounded)
            self._allocated += block.size
            self._peak = max(self._peak, self._allocated)
            self._peak_reserved = max(self._peak_reserved, self._pools.reserved)
            return block

    def free(self, block: Block) -> None:
        """Free a block; it is counted at the allocator's next use."""
        self._returned.append(block)

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._allocated -= block.size
            self._pools.give_back(block)

    def _found(self, size: int) -> Block | None:
        if self._metal is not None:
            high = self._high if self._bounded else None
            limits = MetalLimits(high=high, low=self._low, others=self.profile.context)
            return self._metal.take(size, limits)
        block = self._pools.reuse(size) or self._grown(size)
        if block is None:
            self._pools.release()
            block = self._grown(size)
        return block

    def _grown(self, size: int) -> Block | None:
        growth = self._pools.growth(size, pressed=False)
        if not self._within_cap(growth) or (self._bounded and growth > self._room()):
            return None
        return self._pools.place(size, pressed=False)

    def _within_cap(self, growth: int) -> bool:
        return not self._bounded or self._high is None or self._pools.reserved + growth <= self._high

    def _out_of_memory(self, size: int) -> Exception:
        shortage = _Shortage(
            profile=self.profile,
            requested=size,
            allocated=self._allocated,
            reserved=self._pools.reserved,
            driver=self.driver,
            free=max(0, self._room()),
            limit=self._high,
        )
        if self.profile.backend == "mps":
            return RuntimeError(_metal_text(shortage))
        capped = not self._within_cap(self._pools.growth(size, pressed=False))
        if self.profile.freezes and not capped:
            return HostFrozenError(_frozen_text(shortage))
        import torch

        return torch.OutOfMemoryError(_cuda_text(shortage))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shortage:
    """State of a device when memory runs out, in bytes; `limit` is None without a cap."""

    profile: Profile
    requested: int
    allocated: int
    reserved: int
    driver: int
    free: int
    limit: int | None


def _limits(profile: Profile, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the high and low watermark in bytes that torch reads from the environment.

    The result is None for no limit.

    Raises:
        RuntimeError: If Metal's ratios are a pair that torch refuses.
    """
    if profile.backend != "mps":
        return _share_limit(profile, environ), None
    high = float(environ.get(HIGH, profile.high or 0))
    low = float(environ.get(LOW, profile.low or 0))
    if not 0 <= high <= _MOST_RATIO:
        raise RuntimeError(f"invalid high watermark ratio {high:g}")
    if not 0 <= low <= (high or _MOST_RATIO):
        raise RuntimeError(f"invalid low watermark ratio {low:g}")
    return int(high * profile.total) if high else None, int(low * profile.total) if low else None


def _share_limit(profile: Profile, environ: Mapping[str, str]) -> int | None:
    """Return the limit of the one CUDA setting that caps: `per_process_memory_fraction`."""
    text = next((environ[name] for name in _CUDA_SETTINGS if environ.get(name)), "")
    limit = None
    for key, _, value in (entry.strip().partition(":") for entry in text.split(",")):
        if key == "per_process_memory_fraction":
            limit = int(float(value) * profile.total)
    return limit


def _frozen_text(shortage: _Shortage) -> str:
    return (
        f"simulated {shortage.profile.name}: the host would freeze here instead of raising, with {_words(shortage.reserved)} held and "
        f"{_words(shortage.requested)} more requested of {_words(shortage.free)}; give a budget, so that the allocator is capped before "
        "it gets there."
    )


def _metal_text(shortage: _Shortage) -> str:
    held = f"MPS allocated: {_words(shortage.reserved)}, other allocations: {_words(shortage.profile.context)}"
    tried = f"Tried to allocate {_words(shortage.requested)} on shared pool."
    if shortage.limit is None:
        return f"MPS backend out of memory ({held}). {tried}"
    return (
        f"MPS backend out of memory ({held}, max allowed: {_words(shortage.limit)}). {tried} Use {HIGH}=0.0 to disable upper limit for "
        "memory allocations (may cause system failure)."
    )


def _cuda_text(shortage: _Shortage) -> str:
    rocm, reserved, allocated = shortage.profile.backend == "rocm", shortage.reserved, shortage.allocated
    process = f"Including non-PyTorch memory, this process has {_words(shortage.driver)} memory in use. "
    allowed = "" if shortage.limit is None else f"{_words(shortage.limit)} allowed; "
    return (
        f"{'HIP' if rocm else 'CUDA'} out of memory. Tried to allocate {_words(shortage.requested)}. GPU 0 has a total capacity of "
        f"{_words(shortage.profile.total)} of which {_words(shortage.free)} is free. {'' if rocm else process}{allowed}"
        f"Of the allocated memory {_words(allocated)} is allocated by PyTorch, and {_words(reserved - allocated)} is reserved "
        "by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  {_MANUAL}"
    )


def _words(size: int) -> str:
    """Return a size as torch's `format_size` writes it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
