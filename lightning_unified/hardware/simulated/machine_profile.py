"""The constants of a machine that can be simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_unified.units import GIB

__all__ = ["Profile", "gib"]


def gib(amount: float) -> int:
    """Return the bytes of `amount` GiB."""
    return int(amount * GIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Constants of a machine. Amounts are bytes.

    Attributes:
        name: Value of `simulate=`, as in `"m2-16gb"`.
        hardware: Its `conf/hardware` name.
        backend: Software stack that drives its GPU.
        chip: The GPU's name, as its driver reports it.
        ram: Memory of the host; on a unified pool all memory.
        unified: Whether the GPU uses the host's memory.
        total: Denominator of the allocator's fraction: Metal's recommended working set, elsewhere `props.total_memory`.
        others: Bytes of `ram` held by the system and other programs at rest.
        bf16: Whether the GPU computes in bfloat16 or emulates it.
        flash: Whether attention with gradients has a kernel that saves no scores.
        cores: Cores a process may use; on a Mac the performance cores.
        max_buffer: Largest single buffer (Metal's `maxBufferLength`); None without such a limit.
        page_cache: Page cache within the available bytes at rest: MemAvailable less MemFree.
        gtt: AMD APU: host memory the GPU may map (`mem_info_gtt_total`); None elsewhere.
        context: Bytes the driver holds for the process besides torch's pools.
        capability: CUDA's compute capability.
        arch: AMD's name of the architecture.
        high, low: Metal's default watermark ratios; None on other backends.
        freezes: Whether the machine hangs, instead of raising, when its pool is exhausted.
        origin: Source of each value, by field; `"judgement"` for our own.
    """

    name: str
    hardware: str
    backend: Literal["mps", "cuda", "rocm"]
    chip: str
    ram: int
    unified: bool
    total: int
    others: int
    bf16: Literal["native", "emulated"]
    flash: bool
    cores: int
    max_buffer: int | None = None
    page_cache: int = 0
    gtt: int | None = None
    context: int = 0
    capability: tuple[int, int] | None = None
    arch: str = ""
    high: float | None = None
    low: float | None = None
    freezes: bool = False
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return "mps" if self.backend == "mps" else "cuda"
