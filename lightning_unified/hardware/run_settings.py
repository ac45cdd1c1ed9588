"""How a run uses the machine (`conf/hardware`).

Detect the file's name, refuse absent hardware, resolve `auto`.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.capabilities import Capability, capability
from lightning_unified.hardware.environment.builds import build_advice
from lightning_unified.hardware.host.cgroups import cpu_quota
from lightning_unified.hardware.host.memory import cpu_name, host_total
from lightning_unified.hardware.loader_workers import BatchWork, LoaderWorkers, decide_workers, default_start_method
from lightning_unified.hardware.readers import backends_here, read
from lightning_unified.hardware.reading import Reading
from lightning_unified.hardware.sources import Sources, core_count, read_text
from lightning_unified.units import GIB

__all__ = ["HARDWARE", "HardwareSettings", "describe", "detect", "host_threads", "require"]

HARDWARE = ("auto", "cpu", "cuda", "rocm", "mps", "dgx_spark", "jetson", "strix_halo")
"""The names of `conf/hardware/`."""

_CHOICES = {
    "accelerator": ("auto", "cpu", "cuda", "mps"),
    "start_method": ("auto", "fork", "forkserver", "spawn", None),
    "optimizer_kernel": ("auto", "fused", "foreach", "forloop"),
}


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
        advice = build_advice(sources)
        raise HardwareError(
            f"hardware={hardware} is not present; this machine has: {describe(sources)}; use {choice}."
            + (f" {advice[0].upper()}{advice[1:]}" if advice else "")
        )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSettings:
    """How a run uses a machine; `resolve` replaces each `"auto"`.

    Attributes:
        name: Name of the `conf/hardware` file.
        accelerator: Lightning's accelerator, as a string: with an instance Lightning chooses the wrong scaler.
        precision: Full name of the run's precision; `resolve` keeps `"auto"`, because the precision package decides it.
        num_workers: Number of loader processes. Each is an interpreter in the host's memory.
        persistent_workers: Whether loader processes live across epochs.
        prefetch_factor: Batches each loader process holds ready; None without loader processes.
        pin_memory: Whether batches are copied into page-locked memory first.
        start_method: Start method of loader processes; None without them.
        host_threads: Threads of one CPU operator: `torch.set_num_threads` and, for child processes, `OMP_NUM_THREADS`.
        optimizer_kernel: `"fused"`, `"foreach"` or `"forloop"`.
    """

    name: str = "auto"
    accelerator: str = "auto"
    precision: str = "auto"
    num_workers: int | str = "auto"
    persistent_workers: bool | str = "auto"
    prefetch_factor: int | str | None = "auto"
    pin_memory: bool | str = "auto"
    start_method: str | None = "auto"
    host_threads: int | str = "auto"
    optimizer_kernel: str = "auto"

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise HardwareError(f"hardware.{field}={getattr(self, field)!r} is not known; use one of {listed}.")
        for field, least in (("num_workers", 0), ("prefetch_factor", 1), ("host_threads", 1)):
            _check_count(field, getattr(self, field), least=least)
        for field in ("persistent_workers", "pin_memory"):
            if getattr(self, field) not in (True, False, "auto"):
                raise HardwareError(f"hardware.{field}={getattr(self, field)!r} is not known; use true, false or auto.")

    def workers(
        self, reading: Reading, *, sources: Sources | None = None, work: BatchWork = "gather", rows_bytes: int = 0
    ) -> LoaderWorkers:
        """Return the loader processes of a run, with the reason.

        Args:
            reading: Reading of the device the run will use.
            sources: Sources of the number of cores; default this machine.
            work: The work of a batch; the default is that of the package's own data.
            rows_bytes: Bytes of the rows; 0 if unknown.
        """
        if self.num_workers != "auto":
            return LoaderWorkers(count=int(self.num_workers), reason=f"hardware.num_workers={self.num_workers}")
        method = self.start_method if self.start_method not in ("auto", None) else default_start_method(reading.backend)
        return decide_workers(
            backend=reading.backend,
            pool=reading.pool,
            cores=host_threads(sources),
            host_bytes=reading.host.bytes,
            start_method=method,
            work=work,
            rows_bytes=rows_bytes,
        )

    def resolve(
        self,
        reading: Reading,
        capabilities: Iterable[Capability],
        *,
        sources: Sources | None = None,
        work: BatchWork = "gather",
        rows_bytes: int = 0,
    ) -> "HardwareSettings":
        """Return the settings with a value for each `"auto"`, except that of `precision`.

        Without loader processes their settings become None or False, because the DataLoader raises on them.

        Args:
            reading: Reading of the device the run will use.
            capabilities: Its capabilities.
            sources: Sources of the number of cores; default this machine.
            work: The work of a batch; the default is that of the package's own data.
            rows_bytes: Bytes of the rows; 0 if unknown.
        """
        sources, known = sources or Sources.live(), list(capabilities)
        threads = host_threads(sources) if self.host_threads == "auto" else self.host_threads
        workers = self.workers(reading, sources=sources, work=work, rows_bytes=rows_bytes).count
        loads = workers != 0
        return replace(
            self,
            accelerator=_accelerator(reading) if self.accelerator == "auto" else self.accelerator,
            num_workers=workers,
            persistent_workers=loads and (self.persistent_workers == "auto" or bool(self.persistent_workers)),
            prefetch_factor=(2 if self.prefetch_factor == "auto" else self.prefetch_factor) if loads else None,
            pin_memory=capability("pin_memory", known) if self.pin_memory == "auto" else self.pin_memory,
            start_method=(default_start_method(reading.backend) if self.start_method == "auto" else self.start_method)
            if loads
            else None,
            host_threads=threads,
            optimizer_kernel=_kernel(self.precision, known)
            if self.optimizer_kernel == "auto"
            else self.optimizer_kernel,
        )


def host_threads(sources: Sources | None = None) -> int:
    """Return the number of threads for one CPU operator: the usable performance cores.

    Efficiency cores slow an operator down to their own speed, because its threads wait for each other. A cgroup's processor
    quota counts too: threads beyond it are stopped for the rest of each period.
    """
    sources = sources or Sources.live()
    performance = sources.sysctl("hw.perflevel0.physicalcpu")
    cores = performance if isinstance(performance, int) and performance > 0 else core_count(sources)
    quota = cpu_quota(sources)
    cores = cores or 1
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


def _accelerator(reading: Reading) -> str:
    # Lightning drives ROCm through its CUDA accelerator and has none for Intel GPUs.
    return {"cuda": "cuda", "rocm": "cuda", "mps": "mps"}.get(reading.backend, "cpu")


def _kernel(precision: str, known: list[Capability]) -> str:
    # Fused kernels unscale gradients inside the step, which Lightning refuses with clipping: fp16 runs without them.
    if capability("fused_adamw", known) and not precision.startswith("16-"):
        return "fused"
    return "foreach" if capability("foreach", known) else "forloop"


def _check_count(field: str, value: object, *, least: int) -> None:
    if value == "auto" or (value is None and field == "prefetch_factor"):
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HardwareError(
            f"hardware.{field}={value!r} is not a valid count; use a whole number of at least {least}, or auto."
        )
