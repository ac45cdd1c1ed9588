"""Read the use of every GPU by all programs, from drivers and never from torch.

A watching process must not change what it watches. `torch.cuda.mem_get_info` constructs a CUDA context of some hundred MiB,
and every memory figure of `torch.mps` constructs Metal's allocator. Besides, torch's allocated bytes are those of the asking
process, which trains nothing.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_unified.hardware.host.memory import cpu_name, host_available, host_total
from lightning_unified.hardware.reading import Figure
from lightning_unified.hardware.sources import Sources, read_text
from lightning_unified.units import MIB

__all__ = ["DeviceUse", "GpuReader"]

_PATIENCE_S, _PATIENCE_FOR_TORCH_S = 3.0, 60.0
_NVIDIA = ("index", "uuid", "name", "memory.total", "memory.used", "memory.free", "utilization.gpu")
_ONE_POOL_TOLERANCE = 0.01
_METAL = "from lightning_unified.hardware import read; print(read('mps').total.bytes)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """Use of one device's pool by all programs. All figures are bytes (GiB = 2**30).

    Attributes:
        device: `"host"`, or the GPU as its driver numbers it: `"nvidia:0"`, `"amdgpu:card1"`, `"apple"`. torch may number
            differently.
        name: The device's own name, for people.
        pool: `"dedicated"` or `"unified"`; None if the driver did not answer.
        total: Size of the pool; for Apple's GPU Metal's recommended working set.
        used: Bytes in use. On a unified pool this is the GPU's part.
        available: Bytes available now.
        busy: Share of the time in which the device worked, as the driver reports it; None if it does not.
        busy_source: Source of `busy`, or why it is unknown.
    """

    device: str
    name: str
    pool: Literal["dedicated", "unified"] | None
    total: Figure
    used: Figure
    available: Figure
    busy: float | None
    busy_source: str


class GpuReader:
    """Reads the machine's GPUs repeatedly.

    A missing driver contributes no device; one that does not answer contributes an unknown device.

    Args:
        sources: Sources of the figures; torch is not used.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._working_set: Figure | None = None

    def read(self) -> list[DeviceUse]:
        """Return every NVIDIA, AMD and Apple GPU."""
        return [*self._nvidia(), *self._amd(), *self._apple()]

    def _nvidia(self) -> list[DeviceUse]:
        if self._sources.which("nvidia-smi") is None:
            return []
        rows = self._nvidia_rows("gpu", _NVIDIA)
        if rows is None:
            return [_silent("nvidia", "nvidia-smi did not answer")]
        return [self._nvidia_device(dict(zip(_NVIDIA, row, strict=True))) for row in rows]

    def _nvidia_rows(self, what: str, fields: tuple[str, ...]) -> list[list[str]] | None:
        command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        out = self._sources.run(command, _PATIENCE_S)
        if out is None:
            return None
        rows = ([cell.strip() for cell in line.split(",")] for line in out.splitlines())
        return [row for row in rows if len(row) == len(fields)]

    def _nvidia_device(self, said: dict[str, str]) -> DeviceUse:
        total, used, free = (_mebibytes(said, name) for name in ("memory.total", "memory.used", "memory.free"))
        unified = self._is_one_pool(said["memory.total"], total)
        if unified:
            total, free = host_total(self._sources), host_available(self._sources)
            used = self._nvidia_processes(said["uuid"])
        busy, busy_source = _busy(
            _number(said["utilization.gpu"]),
            source="nvidia-smi utilization.gpu",
            otherwise=f"nvidia-smi says {said['utilization.gpu']}",
        )
        return DeviceUse(
            device=f"nvidia:{said['index']}",
            name=said["name"],
            pool="unified" if unified else "dedicated",
            total=total,
            used=used,
            available=free,
            busy=busy,
            busy_source=busy_source,
        )

    def _is_one_pool(self, text: str, total: Figure) -> bool:
        """Return whether an NVIDIA GPU shares the host's RAM.

        It does on an ARM machine if its driver reports no memory, or all of RAM.

        Source:
            nvitop PR 208 (GB10 with driver 580: not supported), nvtop PR 463 (GB10 with an answer: MemTotal). All such boards
            are ARM ones; GH200 is one too, and reports its own HBM.
        """
        if self._sources.machine not in ("aarch64", "arm64"):
            return False
        ram = host_total(self._sources).bytes
        if total.bytes is None:
            return any(words in text.lower() for words in ("n/a", "not supported"))
        return ram is not None and abs(total.bytes - ram) <= _ONE_POOL_TOLERANCE * ram

    def _nvidia_processes(self, uuid: str) -> Figure:
        """Return the bytes held by the processes on a GPU.

        The driver of a one-pool board reports nothing else (llama-swap issue 782).
        """
        rows = self._nvidia_rows("compute-apps", ("gpu_uuid", "used_memory"))
        if rows is None:
            return Figure(None, "unknown: nvidia-smi lists no processes")
        held = [_number(memory) for owner, memory in rows if owner == uuid]
        if None in held:
            return Figure(None, "unknown: nvidia-smi does not report the memory of its processes")
        return Figure(int(sum(count or 0 for count in held)) * MIB, "nvidia-smi, the sum over its processes")

    def _amd(self) -> list[DeviceUse]:
        found = sorted(self._sources.sys.glob("class/drm/card*/device/mem_info_vram_total"))
        return [self._amd_device(path.parent) for path in found]

    def _amd_device(self, folder: Path) -> DeviceUse:
        """Read an AMD GPU; an APU uses its carve-out and GTT, which is RAM, alike.

        Source:
            Linux, Documentation/gpu/amdgpu: only APUs have the northbridge's voltage, in1 (except MI300A, whose HBM counts as
            VRAM).
        """
        unified = any(folder.glob("hwmon/hwmon*/in1_input"))
        total, used = (_sysfs(folder / f"mem_info_vram_{name}") for name in ("total", "used"))
        free = _difference(total, used)
        if unified:
            reach, taken = (_sysfs(folder / f"mem_info_gtt_{name}") for name in ("total", "used"))
            ram, left = host_total(self._sources), host_available(self._sources)
            total, used = _sum(total, _lower(reach, ram)), _sum(used, taken)
            free = _sum(free, _lower(_difference(reach, taken), left))
        percent = _number(read_text(folder / "gpu_busy_percent"))
        busy, busy_source = _busy(percent, source="gpu_busy_percent", otherwise="no gpu_busy_percent in sysfs")
        name = (read_text(folder / "product_name") or "").strip()
        return DeviceUse(
            device=f"amdgpu:{folder.parent.name}",
            name=name or (cpu_name(self._sources) if unified else "AMD GPU"),
            pool="unified" if unified else "dedicated",
            total=total,
            used=used,
            available=free,
            busy=busy,
            busy_source=busy_source,
        )

    def _apple(self) -> list[DeviceUse]:
        """Read Apple's GPU from its driver's statistics in the I/O registry. Not run on hardware."""
        if self._sources.platform != "darwin" or self._sources.machine != "arm64":
            return []
        out = self._sources.run(["ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"], _PATIENCE_S) or ""
        if self._working_set is None:
            self._working_set = self._recommended()
        source = "IOAccelerator, In use system memory"
        count, name = _statistic(out, "In use system memory"), "Device Utilization %"
        busy, busy_source = _busy(
            _statistic(out, name), source=f"IOAccelerator, {name}", otherwise=f"ioreg shows no {name}"
        )
        used = Figure(count, source if count is not None else f"unknown: ioreg shows no {source}")
        return [
            DeviceUse(
                device="apple",
                name=cpu_name(self._sources),
                pool="unified",
                total=self._working_set,
                used=used,
                available=_lower(_difference(self._working_set, used), host_available(self._sources)),
                busy=busy,
                busy_source=busy_source,
            )
        ]

    def _recommended(self) -> Figure:
        """Query Metal's recommended working set in a child process.

        The query constructs Metal's allocator for the life of the process that makes it.
        """
        out = _number(self._sources.run([sys.executable, "-c", _METAL], _PATIENCE_FOR_TORCH_S))
        if out is None:
            return Figure(None, "unknown: torch.mps.recommended_max_memory could not be asked")
        return Figure(int(out), "torch.mps.recommended_max_memory")


def _silent(device: str, reason: str) -> DeviceUse:
    unknown = Figure(None, f"unknown: {reason}")
    return DeviceUse(
        device=device,
        name="unknown",
        pool=None,
        total=unknown,
        used=unknown,
        available=unknown,
        busy=None,
        busy_source=unknown.source,
    )


def _number(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else None


def _mebibytes(said: dict[str, str], name: str) -> Figure:
    count = _number(said[name])
    if count is None:
        return Figure(None, f"unknown: nvidia-smi {name} says {said[name]}")
    return Figure(int(count * MIB), f"nvidia-smi {name}")


def _busy(percent: float | None, *, source: str, otherwise: str) -> tuple[float | None, str]:
    return (None, f"unknown: {otherwise}") if percent is None else (percent / 100, source)


def _sysfs(path: Path) -> Figure:
    text = (read_text(path) or "").strip()
    return Figure(int(text), path.name) if text.isdigit() else Figure(None, f"unknown: no {path.name} in sysfs")


def _statistic(text: str, name: str) -> int | None:
    found = re.search(rf'"{re.escape(name)}"\s*=\s*(\d+)', text)
    return int(found.group(1)) if found else None


def _sum(one: Figure, other: Figure) -> Figure:
    if one.bytes is None or other.bytes is None:
        return one if one.bytes is None else other
    return Figure(one.bytes + other.bytes, f"{one.source} + {other.source}")


def _difference(whole: Figure, part: Figure) -> Figure:
    if whole.bytes is None or part.bytes is None:
        return whole if whole.bytes is None else part
    return Figure(max(0, whole.bytes - part.bytes), f"{whole.source} - {part.source}")


def _lower(one: Figure, other: Figure) -> Figure:
    known = [figure for figure in (one, other) if figure.bytes is not None]
    return min(known, key=lambda figure: figure.bytes or 0) if known else one
