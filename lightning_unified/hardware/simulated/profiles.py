"""Profiles of the machines that can be simulated, each constant with its source."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from lightning_unified.errors import HardwareError
from lightning_unified.hardware.simulated.boards import BOARDS
from lightning_unified.hardware.simulated.machine_profile import Profile, gib
from lightning_unified.hardware.simulated.macs import MACS
from lightning_unified.units import GIB, MIB

__all__ = ["PROFILES", "Profile", "profile"]

_OLD_CARD = "'total capacity of 11.63 GiB' in out-of-memory texts of 12 GB cards on Linux"


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


_CARDS = (
    _card(
        "rtx3060-12gb",
        hardware="cuda",
        chip="NVIDIA GeForce RTX 3060",
        total=gib(11.63),
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
        total=gib(139.8),
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

PROFILES: Mapping[str, Profile] = MappingProxyType({entry.name: entry for entry in (*MACS, *BOARDS, *_CARDS)})
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
