"""The host of a simulated machine: its memory, as files and sysctls computed when read."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from lightning_unified.hardware.simulated.profiles import Profile
from lightning_unified.units import KIB

__all__ = ["HostFiles", "SimulatedHost"]

# Judgement: shares of RAM left below which the level is warn, and critical. XNU decides by the memory its compressor can still free.
_MAC_WARN, _MAC_CRITICAL = 0.15, 0.05
_LEVELS = {"normal": 1, "warn": 2, "critical": 4}
_MAC_PAGE, _LINUX_PAGE = 16 * KIB, 4 * KIB
_XSW_USED_BITS = 128  # struct xsw_usage, sys/sysctl.h: total, available, used, of 64 bits each


class SimulatedHost:
    """RAM, its holders, and the figures the system reports about it.

    Bytes beyond RAM are swap. Swap never falls by itself: it counts the bytes written.

    Args:
        profile: The machine.
        device_bytes: Returns the bytes the GPU holds now; part of the RAM in use on a unified pool.

    Attributes:
        others: Bytes held by the system and other programs; tests set it.
    """

    def __init__(self, profile: Profile, device_bytes: Callable[[], int]) -> None:
        self.profile = profile
        self.others = profile.others
        self._device_bytes = device_bytes
        self._swapped_out = 0

    @property
    def available(self) -> int:
        """Bytes of RAM available without swapping."""
        return max(0, self.profile.ram - self._in_use())

    @property
    def level(self) -> str:
        """`"normal"`, `"warn"` or `"critical"`, as macOS reports it."""
        share = self.available / self.profile.ram
        return "critical" if share < _MAC_CRITICAL else "warn" if share < _MAC_WARN else "normal"

    def sysctl(self, name: str) -> int | str | None:
        """Return a macOS sysctl's value; None on other machines and for names no reader uses."""
        if self.profile.backend != "mps":
            return None
        available = self.available // _MAC_PAGE
        values: dict[str, int | str] = {
            "hw.memsize": self.profile.ram,
            "hw.pagesize": _MAC_PAGE,
            "hw.physicalcpu": self.profile.cores,
            "hw.perflevel0.physicalcpu": self.profile.cores,
            "machdep.cpu.brand_string": self.profile.chip,
            "iogpu.wired_limit_mb": 0,
            "vm.page_free_count": available // 2,
            "vm.page_purgeable_count": 0,
            "vm.page_pageable_external_count": available - available // 2,
            "kern.memorystatus_vm_pressure_level": _LEVELS[self.level],
            "kern.memorystatus_level": 100 * self.available // self.profile.ram,
            "vm.swapusage": self._swap() << _XSW_USED_BITS,
        }
        return values.get(name)

    def files(self) -> Mapping[str, str]:
        """Return procfs and sysfs by path; empty on a Mac."""
        if self.profile.backend == "mps":
            return {}
        kib = {
            "MemTotal": self.profile.ram,
            "MemFree": max(0, self.available - self.profile.page_cache),
            "MemAvailable": self.available,
            "SwapTotal": 0,
            "SwapFree": 0,
        }
        files = {
            "/proc/meminfo": "".join(f"{name}: {count // KIB} kB\n" for name, count in kib.items()),
            "/proc/cpuinfo": f"model name\t: {self.profile.name}'s processor\nflags\t\t: \n",
            "/proc/vmstat": f"pswpout {self._swap() // _LINUX_PAGE}\n",
        }
        if self.profile.hardware == "jetson":
            files["/proc/device-tree/model"] = f"NVIDIA Jetson, {self.profile.chip}\x00"
        elif self.profile.backend == "cuda":
            files["/proc/driver/nvidia/gpus/0000:01:00.0/information"] = f"Model: \t\t {self.profile.chip}\n"
        if self.profile.gtt is not None:
            card = "/sys/class/drm/card0/device/mem_info_"
            files |= {f"{card}vram_total": "0", f"{card}gtt_total": str(self.profile.gtt)}
        return files

    def _in_use(self) -> int:
        return self.others + (self._device_bytes() if self.profile.unified else 0)

    def _swap(self) -> int:
        self._swapped_out = max(self._swapped_out, self._in_use() - self.profile.ram)
        return self._swapped_out


class HostFiles:
    """A folder or file of a simulated host: the part of `pathlib.Path` that readers use.

    Args:
        files: Returns every file's text by path.
        path: Path of this file or folder.
    """

    def __init__(self, files: Callable[[], Mapping[str, str]], path: str | PurePosixPath) -> None:
        self._files, self._path = files, PurePosixPath(path)

    def __truediv__(self, part: str | PurePosixPath) -> "HostFiles":
        return HostFiles(self._files, self._path / part)

    def __lt__(self, other: "HostFiles") -> bool:
        return self._path < other._path

    def __fspath__(self) -> str:
        return f"/nonexistent{self._path}"  # opening it by name must not find the real machine's file

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.name

    @property
    def parent(self) -> "HostFiles":
        """The folder that holds this path."""
        return HostFiles(self._files, self._path.parent)

    def read_text(self, errors: str | None = None) -> str:
        """Return the file's present text."""
        del errors
        try:
            return self._files()[str(self._path)]
        except KeyError:
            raise FileNotFoundError(f"{self._path} is not a file of the simulated host") from None

    def write_text(self, text: str) -> int:
        """Raise: files of a simulated host cannot be written."""
        raise PermissionError(f"{self._path} of the simulated host cannot be written: {text!r}")

    def is_dir(self) -> bool:
        """Return whether any file lies below."""
        return any(name.startswith(f"{self._path}/") for name in self._files())

    def glob(self, pattern: str) -> Iterator["HostFiles"]:
        """Yield the files below whose relative path matches `pattern`."""
        for name in self._files():
            path = PurePosixPath(name)
            if path.is_relative_to(self._path) and fnmatch(str(path.relative_to(self._path)), pattern):
                yield HostFiles(self._files, path)
