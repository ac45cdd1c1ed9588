"""Boards and processors, other than Macs, whose GPU shares the host's memory. None was run."""

from types import MappingProxyType

from lightning_unified.hardware.simulated.machine_profile import Profile, gib
from lightning_unified.units import MIB

__all__ = ["BOARDS"]


def _jetson(
    name: str,
    *,
    chip: str,
    ram: float,
    free: float,
    cores: int,
    capability: tuple[int, int],
    ram_from: str,
    free_from: str,
) -> Profile:
    others = gib(4)
    compute = f"compute capability {capability[0]}.{capability[1]}"
    return Profile(
        name=name,
        hardware="jetson",
        backend="cuda",
        chip=chip,
        ram=gib(ram),
        unified=True,
        total=gib(ram),
        others=others,
        bf16="native",
        flash=True,
        cores=cores,
        page_cache=gib(ram) - others - gib(free),
        context=500 * MIB,
        capability=capability,
        freezes=True,
        origin=MappingProxyType(
            {
                "ram": ram_from,
                "total": "the same: CUDA reports the board's memory",
                "others": "judgement",
                "page_cache": free_from,
                "bf16": compute,
                "flash": compute,
                "cores": "NVIDIA's data sheet",
                "context": "judgement",
                "freezes": "judgement: as GB10 (pytorch #174358)",
            }
        ),
    )


BOARDS = (
    _jetson(
        "jetson-orin-64gb",
        chip="Orin",
        ram=61,
        free=50,
        cores=12,
        capability=(8, 7),
        ram_from="judgement: the share of 64 GB that Thor shows of 128",
        free_from="judgement",
    ),
    _jetson(
        "jetson-thor-128gb",
        chip="NVIDIA Thor",
        ram=122,
        free=107.1,
        cores=14,
        capability=(11, 0),
        ram_from="122 GB of memory (vllm.cpp #168)",
        free_from="driver's free of 109671 MiB (llama.cpp #15969)",
    ),
    Profile(
        name="gb10-128gb",
        hardware="dgx_spark",
        backend="cuda",
        chip="NVIDIA GB10",
        ram=gib(119.7),
        unified=True,
        total=gib(119.7),
        others=gib(4),
        bf16="native",
        flash=True,
        cores=20,
        page_cache=gib(12.45),
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
        ram=gib(124.9),
        unified=True,
        total=gib(62.47),
        others=gib(4.9),
        bf16="native",
        flash=True,
        cores=16,
        page_cache=gib(5),
        gtt=gib(128),
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
)
"""The boards, in the order of the documentation."""
