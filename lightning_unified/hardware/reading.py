"""Reading of a memory pool: bytes in total, available, allocated, reserved, and at the peak."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_unified.errors import HardwareError

__all__ = ["Backend", "Figure", "Reading", "choose_index", "figure"]

Backend = Literal["cpu", "cuda", "rocm", "mps", "xpu"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes and their source; None bytes means unknown, and `source` says why."""

    bytes: int | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """State of a pool now. All figures are bytes (GiB = 2**30).

    Attributes:
        device: Device as torch writes it: `"cpu"`, `"cuda:0"`, `"mps"`.
        backend: Software stack that drives the device.
        name: The device's own name, for people.
        pool: `"dedicated"` (its own memory) or `"unified"` (shared with the host and with other programs).
        total: Most bytes the device can use: VRAM, RAM within the cgroup limit, Metal's recommended working set.
        available: Bytes that could be allocated now, own cached blocks included, own live bytes excluded.
        allocated: Bytes of live tensors; on the CPU the resident bytes of the process.
        reserved: Bytes the allocator or the driver holds for this process; None on the CPU, which caches nothing itself.
        peak: Highest `allocated` since the process or its counter began.
        host: RAM of the machine: the bound of a unified pool whose `total` is smaller (Metal's working set).
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
    """Return the result of `call` as a `Figure`; an unknown one with the reason if it fails."""
    try:
        return Figure(int(call()), source)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return Figure(None, f"unknown: {source}: {type(error).__name__}: {first_line}"[:160])


def choose_index(index: int | None, *, kind: str, module: object) -> int:
    """Return the device index to read: the requested one, checked, or the current one.

    Raises:
        HardwareError: If there are fewer devices.
    """
    count = int(module.device_count())  # pyright: ignore[reportAttributeAccessIssue]
    chosen = int(module.current_device()) if index is None else index  # pyright: ignore[reportAttributeAccessIssue]
    if not 0 <= chosen < count:
        raise HardwareError(f"device '{kind}:{chosen}' is not present; the indices are 0 to {count - 1}.")
    return chosen
