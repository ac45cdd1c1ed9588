"""Macs with Apple silicon. None was run."""

from types import MappingProxyType

from lightning_unified.hardware.environment.mps import DEFAULT_HIGH, DEFAULT_LOW
from lightning_unified.hardware.simulated.machine_profile import Profile, gib
from lightning_unified.units import GIB, KIB

__all__ = ["MACS"]

_TWO_THIRDS = "2/3 of RAM, as 'max allowed: 9.07 GB' over the ratio 1.7 says on 8 GB (pytorch #105839)"
_NEW_MACOS = "measured on current macOS: 11.84 GiB of 16 (llmfit PR 754, sglang PR 29949)"
_ROUGHLY = "0.74 of RAM, as measured on 16 and 24 GB (sglang PR 29949)"
_THREE_QUARTERS = "three quarters of RAM: 48 GB of 64 and 72 GB of 96 (Rapid-MLX PR 183)"
_MEASURED_128 = "107.52 GiB, measured on macOS 26 with two chips of 128 GB (antirez/ds4 PR 893)"
_BUFFER = (
    "three quarters of the working set, as measured: 4 GiB on 8 GB (llama.cpp PR 1706), about 27 GB on M4 Pro 48 GB "
    "(exo #1048), 36 GiB on M1 Max 64 GB (wgpu PR 2502)"
)
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
        "cores": "Apple's data sheet: performance cores; of M5 Max the six fastest, its super cores",
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
        total=gib(total),
        others=gib(others),
        bf16="native" if int(chip.split()[1][1:]) >= 3 else "emulated",
        flash=False,
        cores=cores,
        max_buffer=int(0.75 * gib(total)),
        context=384 * KIB,
        high=DEFAULT_HIGH,
        low=DEFAULT_LOW,
        origin=MappingProxyType(origin),
    )


MACS = (
    _mac("m1-8gb", chip="Apple M1", ram=8, total=16 / 3, others=3.5, cores=4, total_from=_TWO_THIRDS),
    _mac("m2-16gb", chip="Apple M2", ram=16, total=11.84, others=5, cores=4, total_from=_NEW_MACOS),
    _mac("m3-24gb", chip="Apple M3", ram=24, total=17.76, others=6, cores=4, total_from=_ROUGHLY),
    _mac("m3-max-64gb", chip="Apple M3 Max", ram=64, total=48, others=8, cores=12, total_from=_THREE_QUARTERS),
    _mac("m2-max-96gb", chip="Apple M2 Max", ram=96, total=72, others=8, cores=8, total_from=_THREE_QUARTERS),
    _mac("m4-max-128gb", chip="Apple M4 Max", ram=128, total=107.52, others=8, cores=12, total_from=_MEASURED_128),
    _mac("m5-max-128gb", chip="Apple M5 Max", ram=128, total=107.52, others=8, cores=6, total_from=_MEASURED_128),
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
        total_from=f"judgement: {_ROUGHLY}",
    ),
)
"""The Macs, in the order of the documentation."""
