"""Find the `conf/hardware` name of this machine, and refuse hardware that is not present."""

import difflib

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.host.memory import cpu_name, host_total
from lightning_unified.hardware.readers import backends_here, read
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.sources import Sources, core_count, read_text
from lightning_unified.units import GIB

__all__ = ["HARDWARE", "describe", "detect", "require"]

HARDWARE = ("auto", "cpu", "cuda", "rocm", "mps", "dgx_spark", "jetson", "strix_halo")
"""The names of `conf/hardware/`."""


def detect(sources: Sources | None = None) -> str:
    """Return the `conf/hardware` name of this machine: `"cpu"` if no accelerator can train.

    An Intel GPU gives `"cpu"`: it can be read, but Lightning 2.6 has no accelerator for it.
    """
    sources = sources or Sources.live()
    kind = next(kind for kind in backends_here(sources) if kind != "xpu")
    return kind if kind in {"cpu", "mps"} else _of_gpu(read(kind, sources=sources), sources)


def require(hardware: str, sources: Sources | None = None) -> None:
    """Raise if the requested hardware is not present.

    `cuda` covers DGX Spark and Jetson, and `rocm` Strix Halo: these are narrower names for the same backend.

    Raises:
        HardwareError: If the name is unknown, or the machine differs.
    """
    sources = sources or Sources.live()
    if hardware == "xpu":
        raise HardwareError(
            f"hardware=xpu cannot train: Lightning 2.6 has no accelerator for Intel GPUs, which can only be read "
            f"(doctor --device xpu); this machine has: {describe(sources)}; use hardware=cpu or hardware=auto."
        )
    if hardware not in HARDWARE:
        near = difflib.get_close_matches(hardware, HARDWARE, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise HardwareError(f"hardware={hardware} is not known; {hint}There are {', '.join(HARDWARE)}.")
    if hardware in {"auto", "cpu"}:
        return
    found = detect(sources)
    broader = {"dgx_spark": "cuda", "jetson": "cuda", "strix_halo": "rocm"}.get(found, found)
    if hardware not in {found, broader}:
        choice = "hardware=auto" if found == "cpu" else f"hardware={found}, hardware=cpu or hardware=auto"
        choice = f"hardware=cpu or {choice}" if found == "cpu" else choice
        raise HardwareError(f"hardware={hardware} is not present; this machine has: {describe(sources)}; use {choice}.")


def describe(sources: Sources | None = None) -> str:
    """Return the machine in one line, accelerators first: `"cpu (AMD EPYC, 2 cores, 23.5 GiB)"`."""
    sources = sources or Sources.live()
    parts = []
    for kind in backends_here(sources):
        if kind == "cpu":
            cores, ram = core_count(sources), host_total(sources).bytes
            parts.append(f"cpu ({cpu_name(sources)}, {cores or 'unknown'} cores, {_gib(ram)})")
        else:
            reading = read(kind, sources=sources)
            parts.append(f"{reading.backend} ({reading.name}, {_gib(reading.total.bytes)} {reading.pool})")
    return ", ".join(parts)


def _of_gpu(reading: Reading, sources: Sources) -> str:
    if reading.backend == "rocm":
        return "strix_halo" if reading.pool == "unified" else "rocm"
    if reading.pool == "dedicated":
        return "cuda"
    tree = sources.proc / "device-tree"
    board = f"{read_text(tree / 'compatible') or ''} {read_text(tree / 'model') or ''}".lower()
    return "jetson" if "tegra" in board or "jetson" in board else "dgx_spark"


def _gib(count: int | None) -> str:
    return "unknown memory" if count is None else f"{count / GIB:.1f} GiB"
