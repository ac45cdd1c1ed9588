"""What a memory pool says now: total, available, allocated, reserved and peak, each with its source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.sources import Sources

if TYPE_CHECKING:
    import torch

__all__ = ["Figure", "Reading", "Sources", "backends_here", "choose_index", "figure", "read"]

Backend = Literal["cpu", "cuda", "rocm", "mps", "xpu"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of bytes and where it came from; None bytes means unknown, and `source` then says why."""

    bytes: int | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a pool says now. All figures are bytes (GiB = 2**30).

    Attributes:
        device: As torch writes it: `"cpu"`, `"cuda:0"`, `"mps"`.
        backend: Which software stack drives the device.
        name: The device's own name, for people.
        pool: `"dedicated"` (its own memory) or `"unified"` (shared with the host and with other programs).
        total: What the device can use at most: VRAM, RAM within the cgroup limit, Metal's recommended working set.
        available: What could be allocated now, own cached blocks included, own live bytes not.
        allocated: Live tensors; on the CPU the resident bytes of the process.
        reserved: What the allocator or the driver holds for this process; None on the CPU, which caches nothing itself.
        peak: Highest `allocated` since the process or its counter began.
        host: RAM of the machine, the bound of a unified pool whose `total` is smaller (Metal's working set).
    """

    device: str
    backend: Backend
    name: str
    pool: Literal["dedicated", "unified"]
    total: Figure
    available: Figure
    allocated: Figure
    reserved: Figure
    peak: Figure
    host: Figure = Figure(None, "unknown: not read")


def figure(source: str, call: Callable[[], int]) -> Figure:
    """Return what `call` gives as a `Figure`; a call that fails gives an unknown one, with the reason as its source."""
    try:
        return Figure(int(call()), source)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Figure(None, f"unknown: {source}: {type(error).__name__}: {first_line}"[:160])


def read(device: "str | torch.device" = "auto", *, sources: Sources | None = None) -> Reading:
    """Read the memory pool of `device` without waiting for the device.

    On MPS the first reading constructs Metal's allocator, which freezes both watermark ratios for the life of the
    process. A run that has a budget therefore calls `set_mps_environment(spec)` before anything here; a reading that
    comes first writes the safe pair itself.

    Args:
        device: A torch device or its text; `"auto"` is the accelerator that is here, else the CPU. An Intel GPU is read
            only by name, because Lightning 2.6 cannot train on it.
        sources: Where to read from; default this machine.

    Raises:
        HardwareError: If the device is not here.
    """
    from lightning_unified.hardware.cpu import read_cpu
    from lightning_unified.hardware.cuda import read_cuda
    from lightning_unified.hardware.mps import read_mps
    from lightning_unified.hardware.xpu import read_xpu

    sources = sources or Sources.live()
    here = backends_here(sources)
    trains = next(kind for kind in here if kind != "xpu")
    kind, _, index = (trains if str(device) == "auto" else str(device)).partition(":")
    readers = {"cpu": read_cpu, "cuda": read_cuda, "mps": read_mps, "xpu": read_xpu}
    if kind not in readers or (index and not index.isdigit()):
        raise HardwareError(f"device {str(device)!r} has no reader; use auto, cpu, cuda, cuda:<index>, mps or xpu.")
    if kind not in here:
        raise HardwareError(
            f"device {str(device)!r} is not here; this machine has {', '.join(here)}: use one of these or auto."
        )
    return readers[kind](sources, int(index) if index else None)


def backends_here(sources: Sources) -> list[str]:
    """Return the torch device types that work here; the CPU is always the last."""
    torch = sources.torch
    found = []
    for kind, module in (
        ("cuda", getattr(torch, "cuda", None)),
        ("mps", getattr(getattr(torch, "backends", None), "mps", None)),
        ("xpu", getattr(torch, "xpu", None)),
    ):
        if module is not None and module.is_available():
            found.append(kind)
    return [*found, "cpu"]


def choose_index(index: int | None, *, kind: str, module: object) -> int:
    """Return the device index to read: the one asked for, checked, or the current one.

    Raises:
        HardwareError: If there are fewer devices.
    """
    count = int(module.device_count())  # pyright: ignore[reportAttributeAccessIssue]
    chosen = int(module.current_device()) if index is None else index  # pyright: ignore[reportAttributeAccessIssue]
    if not 0 <= chosen < count:
        raise HardwareError(f"device '{kind}:{chosen}' is not here; the indices are 0 to {count - 1}.")
    return chosen
