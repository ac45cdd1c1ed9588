"""Profiles of the machines that can be simulated, each constant with its source."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.environment.mps import DEFAULT_HIGH, DEFAULT_LOW
from lightning_unified.units import GIB, KIB, MIB

__all__ = ["PROFILES", "Profile", "profile"]


def _gib(amount: float) -> int:
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


_TWO_THIRDS = "2/3 of RAM, as 'max allowed: 9.07 GB' over the ratio 1.7 says on 8 GB (pytorch #105839)"
_NEW_MACOS = "measured on current macOS: 11.84 GiB of 16 (llmfit PR 754, sglang PR 29949)"
_BUFFER = (
    "three quarters of the working set, as measured: 4 GiB on 8 GB (llama.cpp PR 1706), about 27 GB on M4 Pro 48 GB "
    "(exo #1048), 36 GiB on M1 Max 64 GB (wgpu PR 2502)"
)
_OLD_CARD = "'total capacity of 11.63 GiB' in out-of-memory texts of 12 GB cards on Linux"
_TORCH_BF16 = "M3 and later (transformers PR 40458)"
_SCORES = "MPS keeps the scores when gradients are wanted (pytorch #179294)"


def _mac(name: str, *, chip: str, ram: int, total: float, others: float, cores: int, total_from: str) -> Profile:
    origin = {
        "ram": "the model's name",
        "total": total_from,
        "max_buffer": _BUFFER,
        "others": "judgement",
        "bf16": _TORCH_BF16,
        "flash": _SCORES,
        "cores": "Apple's data sheet: performance cores",
        "context": "'other allocations: 384.00 KiB' in MPS out-of-memory texts of small programs",
        "high, low": "disassembly of init_allocator, torch 2.13 (docs/source/mps_environment_variables.rst agrees)",
    }
    return Profile(
        name=name,
        hardware="mps",
        backend="mps",
        chip=chip,
        ram=ram * GIB,
        unified=True,
        total=_gib(total),
        others=_gib(others),
        bf16="native" if int(chip.split()[1][1:]) >= 3 else "emulated",
        flash=False,
        cores=cores,
        max_buffer=int(0.75 * _gib(total)),
        context=384 * KIB,
        high=DEFAULT_HIGH,
        low=DEFAULT_LOW,
        origin=MappingProxyType(origin),
    )


def _card(
    name: str,
    *,
    hardware: Literal["cuda", "rocm"],
    chip: str,
    total: int,
    bf16: Literal["native", "emulated"],
    flash: bool,
    origin: Mapping[str, str],
    capability: tuple[int, int] | None = None,
    arch: str = "",
    ram: int = 32 * GIB,
    cores: int = 8,
    context: int = 300 * MIB,
) -> Profile:
    host = dict.fromkeys(("ram", "others", "cores", "context", "page_cache"), "judgement")
    return Profile(
        name=name,
        hardware=hardware,
        backend=hardware,
        chip=chip,
        ram=ram,
        unified=False,
        total=total,
        others=ram // 8,
        bf16=bf16,
        flash=flash,
        cores=cores,
        page_cache=ram // 4,
        context=context,
        capability=capability,
        arch=arch,
        origin=MappingProxyType(host | dict(origin)),
    )


_ALL = (
    _mac("m1-8gb", chip="Apple M1", ram=8, total=16 / 3, others=3.5, cores=4, total_from=_TWO_THIRDS),
    _mac("m2-16gb", chip="Apple M2", ram=16, total=11.84, others=5, cores=4, total_from=_NEW_MACOS),
    _mac(
        "m4-pro-48gb",
        chip="Apple M4 Pro",
        ram=48,
        total=36,
        others=8,
        cores=10,
        total_from="derived: its longest buffer of 27 GB (exo #1048) is three quarters of it",
    ),
    _mac(
        "m5-32gb",
        chip="Apple M5",
        ram=32,
        total=23.68,
        others=6,
        cores=4,
        total_from="judgement: 0.74 of RAM, as measured on 16 and 24 GB (sglang PR 29949)",
    ),
    Profile(
        name="gb10-128gb",
        hardware="dgx_spark",
        backend="cuda",
        chip="NVIDIA GB10",
        ram=_gib(119.7),
        unified=True,
        total=_gib(119.7),
        others=_gib(4),
        bf16="native",
        flash=True,
        cores=20,
        page_cache=_gib(12.45),
        context=500 * MIB,
        capability=(12, 1),
        freezes=True,
        origin=MappingProxyType(
            {
                "ram": "total_memory equals MemTotal to the byte (unsloth PR 10486)",
                "total": "the same",
                "others": "MemAvailable of 115.7 GiB (unsloth PR 10704)",
                "page_cache": "driver's free of 103.25 GiB, which is MemFree (unsloth PR 10704)",
                "bf16": "compute capability 12.1",
                "flash": "compute capability 12.1",
                "cores": "NVIDIA's data sheet",
                "context": "judgement",
                "freezes": "pytorch #174358, open-gpu-kernel-modules #1358",
            }
        ),
    ),
    Profile(
        name="strix-halo-128gb",
        hardware="strix_halo",
        backend="rocm",
        chip="AMD Radeon 8060S",
        ram=_gib(124.9),
        unified=True,
        total=_gib(62.47),
        others=_gib(4.9),
        bf16="native",
        flash=True,
        cores=16,
        page_cache=_gib(5),
        gtt=_gib(128),
        context=300 * MIB,
        arch="gfx1151",
        origin=MappingProxyType(
            {
                "ram": "unsloth PR 7960: RAM 124.9, GTT 128, total_memory 62.47, free 120 GiB",
                "total": "the same",
                "gtt": "the same",
                "others": "judgement: RAM less what HIP calls free",
                "page_cache": "judgement",
                "bf16": "RDNA 3.5 has bf16 matrix instructions",
                "flash": "AOTriton 0.12 (unsloth PR 8323)",
                "cores": "AMD's data sheet",
                "context": "judgement",
            }
        ),
    ),
    _card(
        "rtx3060-12gb",
        hardware="cuda",
        chip="NVIDIA GeForce RTX 3060",
        total=_gib(11.63),
        bf16="native",
        flash=True,
        capability=(8, 6),
        origin={"total": _OLD_CARD, "bf16": "compute capability 8.6", "flash": "compute capability 8.6"},
    ),
    _card(
        "rx6750xt-12gb",
        hardware="rocm",
        chip="AMD Radeon RX 6750 XT",
        total=12272 * MIB,
        bf16="emulated",
        flash=False,
        arch="gfx1030",
        origin={
            "total": "12272 MB in logs of its 12 GB sibling, RX 6700 XT",
            "arch": "gfx1031 runs the kernels of gfx1030 (HSA_OVERRIDE_GFX_VERSION=10.3.0)",
            "bf16": "RDNA 2 has no bf16 matrix instructions",
            "flash": "AOTriton builds no kernel for RDNA 2 (unsloth PR 8323 lists those it does)",
        },
    ),
    _card(
        "h200",
        hardware="cuda",
        chip="NVIDIA H200",
        ram=256 * GIB,
        total=_gib(139.8),
        bf16="native",
        flash=True,
        cores=16,
        context=500 * MIB,
        capability=(9, 0),
        origin={
            "total": "'total capacity of 139.80 GiB' in out-of-memory texts",
            "bf16": "compute capability 9.0",
            "flash": "compute capability 9.0",
        },
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({entry.name: entry for entry in _ALL})
"""Every machine by name."""


def profile(name: str) -> Profile:
    """Return the machine called `name`.

    Raises:
        HardwareError: If there is none; the message names the nearest.
    """
    wanted = str(name).lower()
    if wanted in PROFILES:
        return PROFILES[wanted]
    near = [each for each in PROFILES if each.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, PROFILES, n=1, cutoff=0.4)
    hint = f" did you mean {near[0]}?" if near else ""
    raise HardwareError(f"simulate={name} is not a known machine;{hint} There are {', '.join(PROFILES)}.")
