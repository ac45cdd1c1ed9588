"""The host of a simulated machine: its memory and what its operating system says of it, as files and sysctls computed when read."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from lightning_unified.hardware.simulated.profiles import Profile
from lightning_unified.units import KIB

__all__ = ["HostFiles", "SimulatedHost"]

# Judgement: how much must be left for the level to be normal, and above critical. XNU decides by what its compressor still finds.
_MAC_WARN, _MAC_CRITICAL = 0.15, 0.05
_LEVELS = {"normal": 1, "warn": 2, "critical": 4}
_MAC_PAGE, _LINUX_PAGE = 16 * KIB, 4 * KIB
_XSW_USED_BITS = 128  # struct xsw_usage, sys/sysctl.h: total, available, used, of 64 bits each


class SimulatedHost:
    """RAM, who holds it, and the figures that the system makes of that.

    What goes beyond RAM is swap, which never gets back to zero by itself: it counts what was written.

    Args:
        profile: The machine.
        device_bytes: What the GPU holds now; part of `in_use` where the pool is one.

    Attributes:
        others: Bytes held by the system and other programs; a test sets it.
    """

    def __init__(self, profile: Profile, device_bytes: Callable[[], int]) -> None:
        self.profile = profile
        self.others = profile.others
        self._device_bytes = device_bytes
        self._swapped_out = 0

    @property
    def available(self) -> int:
        """Bytes of RAM that could be had without swapping."""
        return max(0, self.profile.ram - self._in_use())

    @property
    def level(self) -> str:
        """`"normal"`, `"warn"` or `"critical"`, as macOS would say."""
        share = self.available / self.profile.ram
        return "critical" if share < _MAC_CRITICAL else "warn" if share < _MAC_WARN else "normal"

    def sysctl(self, name: str) -> int | str | None:
        """Return a macOS sysctl's value; None on other machines, and for names that no reader asks."""
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
        if self.profile.backend == "cuda":
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
    """A folder or file of a simulated host: the part of `pathlib.Path` that readers of procfs and sysfs use.

    Args:
        files: Gives every file by path.
        path: Where this one is.
    """

    def __init__(self, files: Callable[[], Mapping[str, str]], path: str | PurePosixPath) -> None:
        self._files, self._path = files, PurePosixPath(path)

    def __truediv__(self, part: str | PurePosixPath) -> "HostFiles":
        return HostFiles(self._files, self._path / part)

    def __lt__(self, other: "HostFiles") -> bool:
        return self._path < other._path

    def __fspath__(self) -> str:
        return f"/nonexistent{self._path}"  # what opens it by name must not find the real machine's

    def __str__(self) -> str:
        return str(self._path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.name

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the path."""
        return self._path.parts

    @property
    def parent(self) -> "HostFiles":
        """The folder this lies in."""
        return HostFiles(self._files, self._path.parent)

    def read_text(self, errors: str | None = None) -> str:
        """Return the file's text as it is now."""
        del errors
        try:
            return self._files()[str(self._path)]
        except KeyError:
            raise FileNotFoundError(f"{self._path} is not a file of the simulated host") from None

    def write_text(self, text: str) -> int:
        """Refuse: nothing of a simulated host can be written."""
        raise PermissionError(f"{self._path} of the simulated host cannot be written: {text!r}")

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return str(self._path) in self._files()

    def is_dir(self) -> bool:
        """Return whether anything lies below."""
        return any(name.startswith(f"{self._path}/") for name in self._files())

    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return self.is_file() or self.is_dir()

    def glob(self, pattern: str) -> Iterator["HostFiles"]:
        """Yield the files below whose path from here is like `pattern`."""
        for name in self._files():
            path = PurePosixPath(name)
            if path.is_relative_to(self._path) and fnmatch(str(path.relative_to(self._path)), pattern):
                yield HostFiles(self._files, path)

    def iterdir(self) -> Iterator["HostFiles"]:
        """Yield what lies directly in this folder."""
        below = (PurePosixPath(name) for name in self._files())
        inside = {path.relative_to(self._path).parts[0] for path in below if path.is_relative_to(self._path)}
        yield from (self / part for part in sorted(inside))
