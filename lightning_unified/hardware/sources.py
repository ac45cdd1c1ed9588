"""Everything the hardware package reads from outside the program, as one injectable record."""

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = [
    "Sources",
    "core_count",
    "installed_torch",
    "major_and_minor",
    "meminfo",
    "read_text",
    "shipped_configuration",
    "torch_version",
]

_TEXT_SYSCTLS = ("machdep.cpu.brand_string", "hw.model", "kern.osproductversion")
_MEMINFO = re.compile(r"^([^:\n]+):[ \t]*(\d+)\b(?:[ \t]*(kB))?", re.MULTILINE)
_HOST_VM_INFO64, _HOST_VM_INFO64_COUNT = 4, 38  # mach/host_info.h: the flavour and its size, in 4-byte integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Sources of all hardware figures; tests and simulated machines inject their own.

    The defaults of the callables return nothing, so a hand-made record never reads the machine it runs on.

    Attributes:
        torch: The torch module, or a namespace with the parts a reader calls.
        proc: Root of procfs; a missing folder means there is none.
        sys: Root of sysfs, with the cgroup mount under `fs/cgroup`.
        sysctl: Returns the value of a macOS sysctl by name, None for an unknown name.
        vm_info: Returns macOS's `vm_statistics64` as the kernel writes it, None elsewhere; `host/mach.py` parses it.
        environ: Environment variables; the watermarks are written into it if it is mutable.
        platform: As `sys.platform`: `"linux"`, `"darwin"`, `"win32"`.
        machine: As `platform.machine()`: `"x86_64"`, `"arm64"`, `"aarch64"`.
        affinity: Returns the number of cores the process may run on, None if unknown.
        max_resident: Returns the highest resident bytes of the process, None if unknown.
        process_start: Returns the start of a running process by its id, in seconds since 1970; None if there is none.
        which: Returns the path of a program, None if it is not installed.
        has_module: Returns whether a Python module could be imported.
        run: Runs a program (command, timeout in seconds) and returns its standard output; None if it is absent, fails or
            hangs.
        simulated: Name of the simulated machine behind these sources; None for a real one.
    """

    torch: Any
    proc: Path = Path("/nonexistent/proc")
    sys: Path = Path("/nonexistent/sys")
    sysctl: Callable[[str], int | str | None] = lambda _name: None
    vm_info: Callable[[], bytes | None] = lambda: None
    environ: Mapping[str, str] = field(default_factory=dict)
    platform: str = "linux"
    machine: str = "x86_64"
    affinity: Callable[[], int | None] = lambda: None
    max_resident: Callable[[], int | None] = lambda: None
    process_start: Callable[[int], float | None] = lambda _pid: None
    which: Callable[[str], str | None] = lambda _name: None
    has_module: Callable[[str], bool] = lambda _name: False
    run: Callable[[Sequence[str], float], str | None] = lambda _command, _timeout_s: None
    simulated: str | None = None

    @classmethod
    def live(cls) -> "Sources":
        """Return the sources of this machine. Imports torch, which constructs no allocator."""
        import torch

        return replace(cls.without_torch(), torch=torch)

    @classmethod
    def without_torch(cls) -> "Sources":
        """Return the sources of this machine without torch.

        They suffice for the host, its pressure and `GpuReader`.
        """
        return cls(
            torch=None,
            proc=Path("/proc"),
            sys=Path("/sys"),
            sysctl=_sysctl_by_name,
            vm_info=_vm_info,
            environ=os.environ,
            platform=sys.platform,
            machine=platform.machine(),
            affinity=_affinity,
            max_resident=_max_resident,
            process_start=_process_start,
            which=shutil.which,
            has_module=lambda name: importlib.util.find_spec(name) is not None,
            run=_Programs(),
        )


def read_text(path: Path) -> str | None:
    """Return the text of a file of procfs or sysfs, None if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def shipped_configuration() -> Path:
    """Return the folder of the shipped YAML files.

    It is the package's own, or `conf` beside the package in a checkout that is not installed.
    """
    try:
        return Path(next(iter(importlib.import_module("lightning_unified.conf").__path__)))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[2] / "conf"


def meminfo(sources: Sources) -> dict[str, int]:
    """Return `/proc/meminfo` in bytes (its "kB" are KiB); empty without procfs."""
    found = _MEMINFO.findall(read_text(sources.proc / "meminfo") or "")
    return {name: int(count) * (1024 if unit else 1) for name, count, unit in found}


def torch_version(sources: Sources) -> tuple[int, int]:
    """Return (major, minor) of torch, (0, 0) if its version text cannot be read."""
    return major_and_minor(str(getattr(sources.torch, "__version__", "")))


def installed_torch() -> tuple[int, int]:
    """Return (major, minor) of the installed torch."""
    import torch

    return major_and_minor(torch.__version__)


def major_and_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version text, (0, 0) if it cannot be read."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def core_count(sources: Sources) -> int | None:
    """Return the cores this process may run on, before any cgroup quota; None if unknown."""
    count = sources.affinity()
    if count is None:
        value = sources.sysctl("hw.physicalcpu")
        count = value if isinstance(value, int) else None
    return count


class _Programs:
    """Runs programs with a timeout.

    A program that hangs in the kernel can be neither killed nor waited for. It is left alone and not started again until it
    ends.
    """

    def __init__(self) -> None:
        self._hung: dict[str, subprocess.Popen[str]] = {}

    def __call__(self, command: Sequence[str], timeout_s: float) -> str | None:
        program = command[0]
        if program in self._hung and self._hung[program].poll() is None:
            return None
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError:
            return None
        try:
            out, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            self._hung[program] = child
            return None
        return out if child.returncode == 0 else None


def _affinity() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return None if sys.platform == "darwin" else os.cpu_count()


def _max_resident() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _process_start(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _sysctl_by_name(name: str) -> int | str | None:
    """Return a sysctl's integer (4 or 8 bytes) or text; None if platform or name is unknown."""
    if sys.platform != "darwin":
        return None
    query = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t(0)
    if query(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    buffer = ctypes.create_string_buffer(size.value)
    if query(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    if name in _TEXT_SYSCTLS:
        return buffer.value.decode(errors="replace")
    return int.from_bytes(buffer.raw[: size.value], sys.byteorder)


@functools.cache
def _mach_host() -> int:
    """Return the port of this machine.

    It is cached, because each `mach_host_self` call holds one more reference to it.
    """
    ask = ctypes.CDLL(None).mach_host_self
    ask.restype = ctypes.c_uint32
    return ask()


def _vm_info() -> bytes | None:
    """Return `host_statistics64(HOST_VM_INFO64)`; None off macOS or if the answer is too short."""
    if sys.platform != "darwin":
        return None
    buffer = ctypes.create_string_buffer(4 * _HOST_VM_INFO64_COUNT)
    count, host = ctypes.c_uint32(_HOST_VM_INFO64_COUNT), ctypes.c_uint32(_mach_host())
    if ctypes.CDLL(None).host_statistics64(host, _HOST_VM_INFO64, buffer, ctypes.byref(count)) != 0:
        return None
    return buffer.raw if count.value == _HOST_VM_INFO64_COUNT else None
